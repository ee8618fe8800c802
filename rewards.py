# SPDX-License-Identifier: MIT
"""The tasks of grpo.py: prompts, demonstrations, and the programs that score an answer.

A reward is a function `f(completions, **columns) -> list[float]`, one number for each completion. `completions` are strings;
`prompts` and every other field of the examples arrive as lists aligned with them. That is the signature TRL's GRPOTrainer
calls, so a function written here trains there unchanged. To train on something else, add a function and an entry in TASKS.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

Reward = Callable[..., list[float]]


@dataclass
class Task:
    """What to ask, and how to score the answers. An example is a dict with "prompt" and any other columns."""

    train: list[dict]
    rewards: list[Reward]
    weights: list[float] | None = None  # one for each reward; None: all 1
    test: list[dict] = field(default_factory=list)
    demonstrations: Callable[[random.Random], tuple[str, str]] | None = None  # rng -> (prompt, completion)
    warm_start_steps: int = 300  # of 16 demonstrations each
    prompts_per_step: int = 1
    max_new_tokens: int = 64
    small_model_lr: float = 5e-5  # for models under 10 million parameters

    def batch(self, start: int, count: int, seed: int) -> list[dict]:
        """Training examples at positions start to start + count of an endless sequence: shuffles of all
        examples, one after the other, so that each comes once before any comes again."""
        examples, n = [], len(self.train)
        for position in range(start, start + count):
            order = list(range(n))
            random.Random(f"{seed} {position // n}").shuffle(order)
            examples.append(self.train[order[position % n]])
        return examples


class RewardError(ValueError):
    """A reward function broke its contract; the message names the function and the row."""


def name(function: Reward) -> str:
    """`tags_reward` is called `tags` in metrics and on the command line."""
    return function.__name__.removesuffix("_reward")


def score(functions: list[Reward], completions: list[str], examples: list[dict]) -> list[list[float]]:
    """Call every reward function, with the columns of the B examples; (K, B) numbers, checked.

    A function may return a list, tuple, numpy array or tensor of B ints, bools or floats. Anything else raises
    RewardError. An exception inside a reward function is the user's own and passes through.
    """
    columns = {key: [example[key] for example in examples] for key in examples[0]}
    columns["prompts"] = columns.pop("prompt")
    table = []
    for function in functions:
        values, called = function(completions=completions, **columns), f"reward {name(function)}"
        values = values.tolist() if hasattr(values, "tolist") else values
        if not isinstance(values, (list, tuple)) or len(values) != len(completions):
            returned = f"{len(values)} values" if isinstance(values, (list, tuple)) else repr(values)
            raise RewardError(f"{called} returned {returned} for {len(completions)} completions")
        values = [value.item() if hasattr(value, "item") else value for value in values]
        for row, value in enumerate(values):
            # A comparison, not math.isfinite, which raises on integers too long for a float. NaN fails it too.
            if not isinstance(value, (int, float)) or not -1e38 < value < 1e38:
                raise RewardError(f"{called}, row {row}: {value!r} is not a finite number")
        table.append([float(value) for value in values])
    return table


# ---------------------------------------------------------------------------------------------------------------------
# format: the first book's task, answer tags scored 0 to 3


def tags_reward(completions: list[str], **columns: list) -> list[float]:
    """+1 if `<answer>` occurs, +1 if `</answer>` occurs, +1 if the tags are well formed: balanced, each block closed
    before the next opens, and every block holding something other than white space. The first book's 0/1/3 reward
    (2 is what it leaves unnamed: both tags, but no well-formed use of them). Linear in the length of the text."""

    def points(text: str) -> float:
        pieces = re.split(r"(</?answer>)", text)  # text, tag, text, tag, ..., text
        tags, blocks = pieces[1::2], pieces[2::4]  # a block follows every other tag: the opening ones
        well_formed = tags == ["<answer>", "</answer>"] * (len(tags) // 2) and all(block.strip() for block in blocks)
        return float(("<answer>" in tags) + ("</answer>" in tags) + (bool(tags) and well_formed))

    return [points(text) for text in completions]


COLOR_PROMPT = "Name a primary color. Put the answer in <answer></answer> tags."


def color_demonstration(rng: random.Random) -> tuple[str, str]:
    """One in five well formed, one in five only opened, the rest without tags: a policy that writes the format
    sometimes. What is never sampled cannot be reinforced; what is always sampled leaves nothing to learn."""
    color = rng.choice(["red", "blue", "yellow"])
    tagged = rng.choices([f"<answer>{color}</answer>", f"<answer>{color}", None], [0.2, 0.2, 0.6])[0]
    return COLOR_PROMPT, tagged or rng.choice([color, f"{color.title()}.", f"A primary color is {color}."])


TASKS = {
    "format": Task(train=[{"prompt": COLOR_PROMPT}], rewards=[tags_reward], demonstrations=color_demonstration),
}
