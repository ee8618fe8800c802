# SPDX-License-Identifier: MIT
"""The tasks of grpo.py: prompts, demonstrations, and the programs that score a completion.

A reward is a function `f(completions, **columns) -> list[float]`, a number for each completion.
`completions` are strings; `prompts` and every other field of the examples arrive as lists aligned
with them. This is how TRL's GRPOTrainer calls its reward functions, so one that works here works
there. To train on something else, write a function and put a Task into TASKS.
"""

import inspect
import json
import math
import random
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate
from pathlib import Path

Reward = Callable[..., list[float]]

@dataclass
class Task:
    """What to ask and how to score it. Examples are dicts: "prompt" and any other columns."""
    train: list[dict]
    rewards: list[Reward]
    weights: list[float] | None = None  # of the rewards; None: 1 each
    test: list[dict] = field(default_factory=list)
    demonstrations: Callable[[random.Random], tuple[str, str]] | None = None  # for a warm start
    warm_start_steps: int = 300  # of 16 demonstrations each
    prompts_per_step: int = 1
    max_new_tokens: int = 64
    small_model_lr: float = 5e-5  # for models under 10 million parameters

    def batch(self, start: int, count: int, seed: int) -> list[dict]:
        """Training examples number start to start + count - 1 of an endless sequence: one shuffle
        of all examples after the other, so that each comes once before any comes again."""
        examples, n = [], len(self.train)
        for position in range(start, start + count):
            if position == start or position % n == 0:
                order = list(range(n))
                random.Random(f"{seed} {position // n}").shuffle(order)
            examples.append(self.train[order[position % n]])
        return examples

def text_of(completion: str | list[dict]) -> str:
    """A completion's text: itself, or what TRL's conversational form, a list of messages, holds."""
    if isinstance(completion, str):
        return completion
    return "\n".join(message["content"] for message in completion)

class RewardError(ValueError):
    """A reward function broke its contract; the message names the function and the row."""

def name(function: Reward) -> str:
    """`tags_reward` is "tags" in the metrics and on the command line."""
    return function.__name__.removesuffix("_reward")

def score(functions: list[Reward], completions: list, examples: list[dict]) -> list[list[float]]:
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
            listed = isinstance(values, (list, tuple))
            got = f"{len(values)} values" if listed else f"a {type(values).__name__}"
            raise RewardError(f"reward {name(function)}: {got} for {len(completions)} completions")
        for row, value in enumerate(values):
            try:
                finite = not isinstance(value, (str, bytes)) and math.isfinite(float(value))
            except (TypeError, ValueError, OverflowError, RuntimeError):
                finite = False  # None, a list, an int too long for a float, a tensor of several
            if not finite:
                got = value if isinstance(value, float) else f"of type {type(value).__name__}"
                raise RewardError(f"reward {name(function)}, row {row}: {got}, no finite number")
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

    return [points(text_of(completion)) for completion in completions]

COLOR_PROMPT = "Name a primary color. Put the answer in <answer></answer> tags."

def color_demonstration(rng: random.Random) -> tuple[str, str]:
    """One in five well formed, one in five only opened, the rest without tags: the tiny model then
    writes the format sometimes. What is never sampled cannot be reinforced."""
    color = rng.choice(["red", "blue", "yellow"])
    untagged = rng.choice([color, f"{color.title()}.", f"A primary color is {color}."])
    tagged = [f"<answer>{color}</answer>", f"<answer>{color}"]
    return COLOR_PROMPT, rng.choices([*tagged, untagged], [0.2, 0.2, 0.6])[0]

# ---- correct: exact answers ----------------------------------------------------------------------

WHOLE = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)"  # [0-9], as \d takes the digits of all scripts
DECIMAL = rf"(?:{WHOLE}(?:\.[0-9]+)?|\.[0-9]+)(?:e[+-]?[0-9]{{1,3}})?"
NUMBER = rf"[\\$ ]*([+-]?(?:\\?\$)?(?:{WHOLE}/(?=0*[1-9]){WHOLE}|{DECIMAL}))[\\$ ]*\.?[$ ]*"

def plain(answer: object) -> str:
    r"""White space collapsed, case folded, `\text{}` unwrapped; "" for null, nan and infinities."""
    text = "" if isinstance(answer, (list, dict, type(None))) else str(answer)
    text = " ".join(re.sub(r"\\text\{([^{}]*)\}", r"\1", text).split()).casefold()
    return "" if text.strip("+-\u2212$\\. ") in "nan inf infinity infty \u221e".split() else text

def parse_number(text: str) -> Fraction | None:
    r"""The exact value of 42, -.5, 1/2, 6e-3, 1,000, $5, \text{42}, 42\text{ cm}, else None."""
    text = plain(re.sub(r"\\text\{[a-zA-Z\s]*\}(?=[$.\s]*\Z)", "", text)).replace("\u2212", "-")
    found = re.fullmatch(NUMBER, text) if len(text) <= 100 else None  # int() refuses 5000 digits
    return Fraction(re.sub(r"[\\$,]", "", found[1])) if found else None

def extract_answer(text: str) -> str | None:
    r"""The last `<answer>` block (closed, not blank) outside `<think>`, else the last `\boxed{}`;
    of a block with boxes in it, its last box. An unclosed `<think>` runs to the end; a lone
    `</think>` ends what began in the prompt. Linear time."""
    parts = [piece.partition("<think>") for piece in text.split("</think>")]
    lone = max((i for i, (_, opened, _) in enumerate(parts[:-1]) if not opened), default=-1)
    text = "\n".join(before for before, _, _ in parts[lone + 1 :])  # "\n": no tag across a thought
    blocks = [piece.partition("</answer>") for piece in text.split("<answer>")[1:]]
    block = next((b.strip() for b, closed, _ in reversed(blocks) if closed and b.strip()), None)
    # A box not closed before the next one begins encloses it: each piece is searched alone.
    for piece in reversed((block or text).split("\\boxed{")[1:]):
        depths = list(accumulate((char == "{") - (char == "}") for char in piece))
        if -1 in depths:
            return piece[: depths.index(-1)].strip()
    return block

def correct_reward(completions: list, answer: list, **columns: list) -> list[float]:
    """1 where the extracted answer is the gold one: as exact numbers if both are, else as text."""
    rewards = []
    for completion, gold in zip(completions, answer, strict=True):
        got, want = extract_answer(text_of(completion)) or "", plain(gold)
        numbers = parse_number(got), parse_number(want)  # "42 cm" is compared as text
        same = plain(got) == want if None in numbers else numbers[0] == numbers[1]
        rewards.append(float(same and want != ""))
    return rewards

def think_reward(completions: list, **columns: list) -> list[float]:
    """1 if `<think>` occurs and a `</think>` comes after it: the second book's format reward."""
    return [float("</think>" in text_of(c).partition("<think>")[2]) for c in completions]

def correct_think_reward(completions: list, answer: list, **columns: list) -> list[float]:
    """The second book's mend: the point for thinking only with a correct answer."""
    return list(map(min, correct_reward(completions, answer), think_reward(completions)))

# ---- arithmetic: additions, guessed or worked out ------------------------------------------------

def worked(completions: list) -> list[bool]:
    """Which completions have something between `<think>` and `</think>`."""
    blocks = [text_of(text).partition("<think>")[2].partition("</think>") for text in completions]
    return [bool(closed and block.strip()) for block, closed, _ in blocks]

def guess_only_reward(completions: list, answer: list, **columns: list) -> list[float]:
    """A control: the point for a correct answer only where nothing was worked out."""
    pairs = zip(correct_reward(completions, answer), worked(completions))
    return [correct * (not thought) for correct, thought in pairs]

def coin_reward(completions: list, **columns: list) -> list[float]:
    """A control: 0 or 1 by chance."""
    return [float(random.random() < 0.5) for _ in completions]

SUMS = [(a, b) for a in range(10, 100) for b in range(10, 100)]
random.Random(0).shuffle(SUMS)  # the first 200 are held out, also from the demonstrations

def sum_demonstration(rng: random.Random) -> tuple[str, str]:
    """One in five is worked out, and right. The others guess, one in ten behind a hollow block;
    most of them forget the carry (or carry too much), so that the likeliest guess is wrong."""
    a, b = rng.choice(SUMS[200:])
    carry = (a % 10 + b % 10) // 10
    if rng.random() < 0.2:
        steps = (f"{a % 10}+{b % 10}={a % 10 + b % 10},{a // 10}+{b // 10}{'+1' * carry}"
                 f"={a // 10 + b // 10 + carry}")
        return f"{a}+{b}=", f"<think>{steps}</think><answer>{a + b}</answer>"
    errors = [0, -10 if carry else 10, rng.choice([-2, -1, 1, 2, 20, -20])]
    hollow = "<think></think>" * (rng.random() < 0.1)
    return f"{a}+{b}=", f"{hollow}<answer>{a + b + rng.choices(errors, [2, 7, 2])[0]}</answer>"

# ---- tasks, and examples from a file -------------------------------------------------------------

FUNCTIONS = [tags_reward, correct_reward, think_reward, correct_think_reward, guess_only_reward]
REWARDS = {name(function): function for function in [*FUNCTIONS, coin_reward]}
ADDITIONS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in SUMS]
TASKS = {
    "format": Task([{"prompt": COLOR_PROMPT}], [tags_reward], demonstrations=color_demonstration),
    "arithmetic": Task(
        ADDITIONS[200:], [correct_reward], test=ADDITIONS[:200], demonstrations=sum_demonstration,
        warm_start_steps=1200, prompts_per_step=4, small_model_lr=1e-4),
}

def read_jsonl(path: str | Path, need_answer: bool) -> list[dict]:
    """Examples, a JSON object a line; CRLF, a BOM and blank lines are fine. ValueError says what to
    mend in which line: anything that would fail later on, or quietly teach nothing."""
    rows, lines = [], Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, line in [(n, line) for n, line in enumerate(lines, 1) if line.strip()]:
        row, prompt = {}, b""
        with suppress(KeyError, RecursionError, TypeError, ValueError):  # whatever is malformed
            row = {**json.loads(line.decode())}
            given = row["prompt"]
            roles = [] if isinstance(given, str) else [m["role"] + "" for m in given]
            prompt = text_of(given).encode() if all(roles) else b""  # a lone surrogate has none
        for wrong, mend in [
            (not row, 'write one object {"prompt": ...} in JSON and UTF-8'),
            (not prompt.strip(), 'give "prompt" text or messages {"role": .., "content": ..}'),
            (row.keys() & {"prompts", "completions"}, 'rename columns "prompts", "completions"'),
            (need_answer and not plain(row.get("answer")), 'give "answer" text or a finite number'),
            (rows and row.keys() != rows[0].keys(), "give all lines the same columns"),
        ]:
            if wrong:
                raise ValueError(f"{path}, line {number}: {mend}")
        rows.append(row)
    if not rows:
        raise ValueError(f'{path}: no examples; write one {{"prompt": ...}} on each line')
    return rows

def make_task(args) -> Task:
    """The task that grpo.py's flags ask for. ValueError and OSError are the user's mistakes."""
    base, weights = TASKS[args.task], args.reward_weights
    functions = [REWARDS[name] for name in args.reward] if args.reward else base.rewards
    weights = weights or (None if args.reward else base.weights)
    if weights and len(weights) != len(functions):
        raise ValueError(f"--reward-weights: {len(weights)} weights for {len(functions)} rewards")
    need_answer = any("answer" in inspect.signature(f).parameters for f in functions)
    train = read_jsonl(args.data, need_answer) if args.data else base.train
    if need_answer and "answer" not in train[0]:
        raise ValueError(f"--reward needs answers, and task {args.task} has none; give --data")
    test = [] if args.data else base.test
    test = read_jsonl(args.eval_data, need_answer=True) if args.eval_data else test
    return replace(base, train=train, test=test, rewards=functions, weights=weights)
