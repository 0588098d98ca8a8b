"""python -m perf_trampoline: look after what recordings leave."""

import argparse

from perf_trampoline import attaching, images, status


def main():
    parser = argparse.ArgumentParser(prog="python -m perf_trampoline", description="Perf trampolines for Python.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("status", help="can there be trampolines here, and if not, why")
    purge = commands.add_parser("purge", help="remove ELF images of processes that have ended")
    purge.add_argument("--days", type=float, default=0, help="only those that are so old (default: all)")
    attaching.add_arguments(commands)
    options = parser.parse_args()
    if options.command in ("attach", "detach"):
        attaching.main(options)
    elif options.command == "purge":
        print(*images.purge(options.days * 24 * 3600), sep="\n")
    else:
        for key, value in status().items():
            print(f"{key:13} {value}")


main()
