import inspect
import re

from shared import keys as keys_module
from shared.keys import Keys


def test_the_table_documents_every_key_and_no_other() -> None:
    properties = {name for name, value in vars(Keys).items() if isinstance(value, property)}
    documented = set(
        re.findall(r"^\| (\w+) +\| (?:hash|zset|list|stream|channel|string)", inspect.getdoc(keys_module) or "", re.MULTILINE)
    )
    assert documented == properties


def test_all_keys_of_a_run_hash_to_one_slot() -> None:
    keys = Keys("demo")
    names = [getattr(keys, name) for name, value in vars(Keys).items() if isinstance(value, property)]
    assert keys.ledger == "headrace:{demo}:ledger"
    assert all(name.startswith("headrace:{demo}:") for name in names)
    assert len(set(names)) == len(names)
