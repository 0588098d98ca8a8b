"""perf-trampoline status."""

import json

import perf_trampoline


def add_arguments(parser):
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def run(options):
    status = perf_trampoline.status()
    if options.json:
        print(json.dumps(status))
    else:
        for key, value in status.items():
            print(f"{key:13} {value}")
    return 0
