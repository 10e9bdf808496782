"""The main pipeline: GRPO of a small language model on two-digit arithmetic, to the end.

python experiments/quickstart.py            # the same as: rl-fn train policy, without --model
python experiments/quickstart.py --help     # every option
"""

import sys

from rl_tools.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", "policy", *sys.argv[1:]]))
