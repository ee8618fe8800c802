# SPDX-License-Identifier: MIT
"""The tasks of grpo.py: prompts, demonstrations, and the programs that score a completion.

A reward is a function `f(completions, **columns) -> list[float]`, a number for each completion.
`completions` are strings; `prompts` and every other field of the examples arrive as lists aligned
with them. This is how TRL's GRPOTrainer calls its reward functions, so one that works here works
there. To train on something else, write a function and put a Task into TASKS.
"""

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

Reward = Callable[..., list[float]]


@dataclass
class Task:
    """What to ask and how to score it. Examples are dicts: "prompt" and any other columns."""

    train: list[dict]
    rewards: list[Reward]
    weights: list[float] | None = None  # of the rewards; None: 1 each
    test: list[dict] = field(default_factory=list)
    # What the tiny model learns from before GRPO: rng -> (prompt, completion).
    demonstrations: Callable[[random.Random], tuple[str, str]] | None = None
    warm_start_steps: int = 300  # of 16 demonstrations each
    prompts_per_step: int = 1
    max_new_tokens: int = 64
    small_model_lr: float = 5e-5  # for models under 10 million parameters

    def batch(self, start: int, count: int, seed: int) -> list[dict]:
        """Training examples number start to start + count - 1 of an endless sequence: one shuffle
        of all examples after the other, so that each comes once before any comes again."""
        examples, n = [], len(self.train)
        for position in range(start, start + count):
            order = list(range(n))
            random.Random(f"{seed} {position // n}").shuffle(order)
            examples.append(self.train[order[position % n]])
        return examples


class RewardError(ValueError):
    """A reward function broke its contract; the message names the function and the row."""


def name(function: Reward) -> str:
    """`tags_reward` is "tags" in the metrics and on the command line."""
    return function.__name__.removesuffix("_reward")


def score(
    functions: list[Reward], completions: list[str], examples: list[dict]
) -> list[list[float]]:
    """Call every reward function with the columns of the B examples: K lists of B numbers.

    A function may return a list, a tuple, a numpy array or a tensor, of ints, bools or floats. What
    else it returns raises RewardError; what it raises is its author's own and passes through.
    """
    columns = {key: [example[key] for example in examples] for key in examples[0]}
    columns["prompts"] = columns.pop("prompt")
    table = []
    for function in functions:
        values = function(completions=completions, **columns)
        values = values.tolist() if hasattr(values, "tolist") else values
        if not isinstance(values, (list, tuple)) or len(values) != len(completions):
            got = f"{len(values)} values" if isinstance(values, (list, tuple)) else repr(values)
            raise RewardError(
                f"reward {name(function)} returned {got} for {len(completions)} completions"
            )
        for row, value in enumerate(values):
            try:
                finite = not isinstance(value, str) and math.isfinite(float(value))
            except (TypeError, ValueError, OverflowError, RuntimeError):
                finite = False  # None, a list, an int too long for a float, a tensor of several
            if not finite:
                got = value if isinstance(value, float) else f"of type {type(value).__name__}"
                raise RewardError(f"reward {name(function)}: row {row} is {got}, not a finite number")
        table.append([float(value) for value in values])
    return table


# ---- format: the first book's task ---------------------------------------------------------------


def tags_reward(completions: list[str], **columns: list) -> list[float]:
    """0 to 3: a point if `<answer>` occurs, one if `</answer>` does, and one if the tags are well
    formed: every block closed before the next opens, and holding more than white space.

    The first book's reward. Its table has 0, 1 and 3; 2 is both tags, not well formed. Linear time.
    """

    def points(text: str) -> float:
        pieces = re.split(r"(</?answer>)", text)  # text, tag, text, ..., tag, text
        tags, blocks = pieces[1::2], pieces[2::4]  # a block follows every opening tag
        in_order = tags == ["<answer>", "</answer>"] * (len(tags) // 2)
        well_formed = bool(tags) and in_order and all(block.strip() for block in blocks)
        return float(("<answer>" in tags) + ("</answer>" in tags) + well_formed)

    return [points(text) for text in completions]


COLOR_PROMPT = "Name a primary color. Put the answer in <answer></answer> tags."


def color_demonstration(rng: random.Random) -> tuple[str, str]:
    """One in five well formed, one in five only opened, the rest without tags: the tiny model then
    writes the format sometimes. What is never sampled cannot be reinforced."""
    color = rng.choice(["red", "blue", "yellow"])
    plain = rng.choice([color, f"{color.title()}.", f"A primary color is {color}."])
    tagged = [f"<answer>{color}</answer>", f"<answer>{color}"]
    return COLOR_PROMPT, rng.choices([*tagged, plain], [0.2, 0.2, 0.6])[0]


TASKS = {
    "format": Task(
        train=[{"prompt": COLOR_PROMPT}],
        rewards=[tags_reward],
        demonstrations=color_demonstration,
    ),
}
