"""`python -m benchmarks races NAME`: races an example against a program people use.

Without a name it lists the races. `make race NAME=gensim` does the same.
"""

import argparse
import importlib
import json
import sys

from benchmarks.races import common


TITLE = "Races an example against a program people use."
NAMES = "gensim", "implicit", "lightfm", "pykeen", "fuxictr", "vowpal"


def setting(text):
    name, _, value = text.partition("=")
    return name, json.loads(value)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="races", description=TITLE)
    parser.add_argument("name", nargs="?", choices=NAMES)
    parser.add_argument("--data", help="which data, or a file; the race's page says")
    parser.add_argument("--epochs", type=int, nargs=2, help="of ours and peer")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lr", type=float, nargs=2, help="of ours and peer; no tuning")
    parser.add_argument("--set", type=setting, nargs="*", default=[], help="NAME=VALUE")
    parser.add_argument("--plot", metavar="FILE.png", help="the score over seconds")
    parser.add_argument("--side", metavar="JSON", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.name is None:
        for name in NAMES:
            module = importlib.import_module(f"benchmarks.races.{name}")
            print(f"{name}: {str(module.__doc__).splitlines()[0]}")
        return 0
    module = importlib.import_module(f"benchmarks.races.{args.name}")
    if args.side:
        module.ours(json.loads(args.side))
        return 0
    args.data = args.data or module.DATA[0]
    return common.race(args.name, args)


if __name__ == "__main__":
    sys.exit(main())
