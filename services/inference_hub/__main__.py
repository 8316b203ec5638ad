"""`python -m services.inference_hub --config run.yaml`: serves the hub until SIGTERM or SIGINT."""

import sys

from shared.run_arguments import run_parser

EXAMPLES = """examples:
  python -m services.inference_hub --config run.yaml
  python -m services.inference_hub --config run.yaml --set inference_hub.port=8900
  python -m services.inference_hub --config run.yaml --set 'engines.urls=["http://10.0.0.7:30000"]'
"""


def main() -> int:
    parser = run_parser(
        prog="python -m services.inference_hub",
        description="One address in front of all inference engines: routing, weight updates, resumption.",
        epilog=EXAMPLES,
    )
    arguments = parser.parse_args()

    from services.inference_hub.server import run
    from shared.configuration import load
    from shared.errors import HeadraceError

    try:
        run(load(arguments.config, overrides=arguments.overrides))
    except HeadraceError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
