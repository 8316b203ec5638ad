"""docs/metrics.md says of every metric what it is, and of none that does not exist."""

import re
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from services.env_agents.metrics import AgentMetrics
from services.inference_hub.engines import EngineRegistry
from services.inference_hub.gate import Gate
from services.inference_hub.metrics import Metrics
from shared.keys import Keys
from trainer.tracking import UpdateMetrics

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs" / "metrics.md"
DECLARED_IN = {"services/env_agents/metrics.py", "services/inference_hub/metrics.py"}
"""Where services declare what they export; each is held against the page below."""


def documented(section: str) -> list[list[str]]:
    """The rows of all tables of a `##` section, each with its cells."""
    [text] = [part for part in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE) if part.startswith(section)]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")]
    assert all(len(row) == 4 and all(row) for row in rows), "a row has a name, a unit, a meaning and a healthy range"
    return rows


def exported(text: str) -> set[str]:
    """Names as they are scraped, but for the parts of a histogram."""
    families = [family for family in text_string_to_metric_families(text) if not family.name.endswith("_created")]
    return {f"{family.name}_total" if family.type == "counter" else family.name for family in families}


def hub_metrics(redis_client) -> set[str]:
    gate = Gate()
    return exported(generate_latest(Metrics(EngineRegistry(redis_client, Keys("run"), gate), gate, []).collectors).decode())


@pytest.mark.parametrize(
    ("section", "declared"),
    [
        ("Each update", lambda _: set(UpdateMetrics.__struct_fields__)),
        ("The hub", hub_metrics),
        ("The agents", lambda _: exported(AgentMetrics().exposition().decode())),
    ],
)
def test_every_metric_has_its_row_and_no_other_has(section, declared, redis_client):
    names = [row[0].strip("`") for row in documented(section)]
    assert len(set(names)) == len(names)
    assert set(names) == declared(redis_client)


def test_nothing_is_exported_from_anywhere_else():
    declaring = re.compile(r"^from prometheus_client.* import .*\b(Counter|Gauge|Histogram|Summary|Info|Enum)\b", re.MULTILINE)
    sources = (REPOSITORY / "services").rglob("*.py")
    assert {str(path.relative_to(REPOSITORY)) for path in sources if declaring.search(path.read_text())} == DECLARED_IN
