"""`disagg keys`: make a key for a client, and the line of the key file that lets it in."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from disagg.router.key_file import make_entry, new_key, read_key_file

EXAMPLES = """\
examples:
  disagg keys new --name alice
  disagg keys new --name batch --requests-per-minute 600 --max-concurrent 8 --models small,large
  disagg keys list keys.txt

The key is printed once and stored nowhere; the line goes into the file that --api-key-file names.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command; 0 if all went well.

    Raises:
        ConfigError: If a name, a limit or a file is wrong.
    """
    args = _parser().parse_args(argv)
    if args.action == "list":
        for entry in read_key_file(args.file):
            name, _, *rest = entry.line.split()
            print(" ".join([name, *rest]))
        return 0
    limits = {
        "requests_per_minute": args.requests_per_minute,
        "max_concurrent": args.max_concurrent,
        "models": args.models,
    }
    key = new_key()
    entry = make_entry(args.name, key, [f"{k}={v}" for k, v in limits.items() if v is not None], "--name")
    print(f"key, shown only now:\n  {key}\nline for the key file:\n  {entry.line}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="disagg keys",
        description="Make keys for clients of the endpoint.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser("new", help="print a fresh key, and its line for the key file")
    new.add_argument("--name", required=True, help="what logs and metrics call it")
    new.add_argument("--requests-per-minute", metavar="N", help="how many requests it may begin per minute")
    new.add_argument("--max-concurrent", metavar="N", help="how many requests it may have open")
    new.add_argument("--models", metavar="NAMES", help="models that it may use, with commas between them")
    listing = actions.add_parser("list", help="print the names and limits in a key file")
    listing.add_argument("file", help="the key file")
    return parser
