"""Carries out command lines one after the other in one process, so that torch is imported once; a script.

    python verbs_runner.py '[["train", "data=synthetic"], ["generate", "runs/a"]]'

The verb `plan` here composes and settles without training. Stops at the first exit code that is not 0 and ends with it.
"""

from __future__ import annotations

import json
import sys

from llmtrain.cli.dispatch import dispatch
from llmtrain.config.compose import compose_config
from llmtrain.plan.make_plan import make_plan
from llmtrain.train.machine import detect_machine


def main() -> int:
    for verb, *words in json.loads(sys.argv[1]):
        print("::", verb, *words, flush=True)
        if verb == "plan":
            config = compose_config(words).config
            print(make_plan(config, detect_machine(config.launch)))
        elif code := dispatch([verb, *words]):
            return code
    return 0


# Workers that are spawned import this module again.
if __name__ == "__main__":
    sys.exit(main())
