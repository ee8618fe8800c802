# SPDX-License-Identifier: MIT
"""The tasks of grpo.py: prompts, demonstrations, and the programs that score a completion.
A reward is a function `f(completions, **columns) -> list[float]`, a number for each completion.
`prompts`, `completion_ids` and every field of the examples come as aligned lists, as TRL's
GRPOTrainer calls its own. To train on something else, write one and put a Task into TASKS."""

import inspect
import json
import math
import random
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path


def tags_reward(completions, **columns):
    """The first book's 0/1/3: a point if `<answer>` occurs, one if `</answer>` does, and one if the
    tags are well formed: every block closed before the next opens, and more than white space."""
    rewards = []
    for text in map(text_of, completions):
        points = float("<answer>" in text) + float("</answer>" in text)
        tags = re.findall(r"</?answer>", text)
        if tags and tags == ["<answer>", "</answer>"] * (len(tags) // 2):
            blocks = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
            points += all(block.strip() for block in blocks)
        rewards.append(points)
    return rewards


def text_of(completion: str | list[dict]) -> str:
    """The text of a string or of messages; content that is missing, null or a list has none."""
    if isinstance(completion, str):
        return completion
    return "\n".join(m["content"] for m in completion if isinstance(m.get("content"), str))


SPELLINGS = [  # what means the same, mostly in LaTeX, and the spelling that is compared
    (r"\\!|\\(?=%)|\\(?:left|right|bigg?[lrm]?)(?![a-z])", ""),
    (r"\{,\}|(?<=[0-9])\\,(?=[0-9]{3})", ","),  # 10{,}080 and 10\,080
    (r"\\[,;: ]|\\?\$|\\[()\[\]]", " "),
    (r"\\text(?:bf|it|rm)?\{([^{}]*)\}", r"\1"),
    (r"\\[dt]?frac ?(?=[0-9{])", r"\\frac"),
    (r"\\frac(?:\{([^{}]*)\}|([0-9])) ?(?:\{([^{}]*)\}|([0-9]))", r"\\frac{\1\2}{\3\4}"),
    (r"\s+", " "),
    (r" (?![\w.,])|(?<![\w.,]) ", ""),  # 6 + 9i is 6+9i, but 1 2 is not 12, nor is 1, 234 1,234
    (r"(?<=[^. ]) ?\.\Z", ""),
]
WHOLE = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)"  # [0-9], as \d takes the digits of all scripts
DECIMAL = rf"(?:{WHOLE}(?:\.[0-9]+)?|\.[0-9]+)(?:e[+-]?[0-9]{{1,3}})?"
NUMBER = rf"[+-]?(?:{WHOLE}/(?=0*[1-9]){WHOLE}|{DECIMAL})"
COUNTS = "and|or|to|point|hal(?:f|ve)|squared|percent|dozen|hundred|thousand|(?:m|b|tr)illion|[eix]"
UNIT = rf"\\text\{{(?!\s*(?:{COUNTS})s?\b)[a-zA-Z\s]*\}}[$.\s]*\Z"
SIGN = r"(?<![\w.,/^])(?<!\^\{)(?:(?<![-+)\]}])[-+\u2212]\\?\$?)?"  # 10-5 has none
DIGITS = r"\.?[0-9][0-9.,/]*(?:[eE][+-]?[0-9]+)?(?:\^\{?[0-9])?"  # 2^10 is taken whole
IN_TEXT = rf"{SIGN}(?:[0-9]*\\[dt]?frac\{{[^{{}}]*\}}\{{[^{{}}]*\}}|{DIGITS})"


def plain(answer: object) -> str:
    """One spelling of answers that mean the same, of GSM8K's what follows `####`; "" for none."""
    text = "" if isinstance(answer, (list, dict, type(None))) else str(answer)
    text = text.rpartition("####")[2].casefold().replace("\u2212", "-").strip()
    for pattern, spelling in SPELLINGS:
        text = re.sub(pattern, spelling, text)
    return "" if text in ("nan", "+nan", "-nan") else text


def parse_number(answer: object) -> Fraction | None:
    r"""The exact value of 42, -.5, 1/2, \frac43, 6e-3, 1,000, $5, 90^\circ, else None."""
    text = re.sub(r"(?:\^\\circ|\^\{\\circ\}|\u00b0)\Z", "", plain(answer))
    text = re.sub(r"\A([+-]?)\\frac\{([^{}]*)\}\{([^{}]*)\}\Z", r"\1\2/\3", text)
    fits = len(text) <= 100 and re.fullmatch(NUMBER, text)  # int() refuses 5000 digits
    return Fraction(text.replace(",", "")) if fits else None


def same_answer(got: str, gold: object) -> bool:
    """Whether an answer is the gold one: as exact numbers where that is a number, else as text."""
    number = parse_number(gold)
    if number is not None:
        return parse_number(re.sub(UNIT, "", got)) == number  # 42\text{ cm} is 42
    texts = [re.sub(" ?, ?", ",", plain(answer)) for answer in (got, gold)]
    return texts[0] == texts[1] != "" and parse_number(got) is None


def outside_thoughts(completion: str | list[dict]) -> str:
    """The text without thoughts: unclosed ones run to the end, others may begin in the prompt."""
    text = re.sub(r"(?s)<think>.*?(?:</think>|\Z)", "\n", text_of(completion))
    return text.rpartition("</think>")[2]


def extract_answer(text: str) -> str | None:
    r"""The last `<answer>` block (closed, not blank) outside `<think>`, else the last `\boxed{}`
    (or `\boxed 42`); of a block with boxes in it, its last box."""
    text = outside_thoughts(text)
    pieces = [piece.partition("</answer>") for piece in text.split("<answer>")[1:]]
    blocks = [block.strip() for block, closed, _ in pieces if closed and block.strip()]
    answer = blocks[-1] if blocks else None
    # A box not closed before the next one begins encloses it: each piece is searched alone.
    for piece in reversed(re.split(r"\\boxed\s*(?=\{|[+-]?\.?[0-9])", answer or text)[1:]):
        if piece[0] != "{":
            return re.match(r"[^\s{}$]*", piece)[0]
        depth = 0
        for brace in re.finditer(r"\\.|[{}]", piece, re.DOTALL):  # `\{` does not nest
            depth += (brace[0] == "{") - (brace[0] == "}")
            if depth == 0:
                return piece[1 : brace.start()].strip()
    return answer


def correct_reward(completions, answer, **columns):
    """1 where the answer in `<answer>` or in a box is the gold one."""
    found = [extract_answer(text_of(completion)) or "" for completion in completions]
    return [float(same_answer(*pair)) for pair in zip(found, answer, strict=True)]


def number_reward(completions, answer, **columns):
    """1 where the last number outside `<think>` is the gold answer."""
    found = [re.findall(IN_TEXT, outside_thoughts(c)) or [""] for c in completions]
    pairs = zip(found, answer, strict=True)
    return [float(same_answer(numbers[-1].rstrip(".,/"), gold)) for numbers, gold in pairs]


def thought_in(completion: str | list[dict]) -> str | None:
    """What stands between `<think>` and a later `</think>`, else None. A lone `</think>` closes a
    block of the prompt, unless nothing or another tag (a misspelt `<thnik>`) comes before it."""
    text = text_of(completion)
    if re.match(r"\s*[^<\s][^<]*</think>(?!.*<think>)", text, re.DOTALL):
        text = "<think>" + text
    block, closed, _ = text.partition("<think>")[2].partition("</think>")
    return block if closed else None


def worked(completions: list) -> list[bool]:  # which hold a thought that is not blank
    return [bool((thought_in(completion) or "").strip()) for completion in completions]


def think_reward(completions, **columns):
    """1 if `<think>` occurs and a `</think>` comes after it: the second book's format reward."""
    return [float(thought_in(completion) is not None) for completion in completions]


def correct_think_reward(completions, answer, **columns):
    """The second book's mend: the point for thinking only with a correct answer."""
    return list(map(min, correct_reward(completions, answer), think_reward(completions)))


def overlong_reward(completions, completion_ids, soft=48, hard=64, **columns):
    """DAPO's soft overlong punishment (eq. 13): (soft - n) / (hard - soft) within -1 and 0."""
    return [max(-1.0, min(0.0, (soft - len(ids)) / (hard - soft))) for ids in completion_ids]


def guess_only_reward(completions, answer, **columns):
    """A control: the point for a correct answer only where nothing was worked out."""
    pairs = zip(correct_reward(completions, answer), worked(completions))
    return [correct * (not thought) for correct, thought in pairs]


def coin_reward(completions, **columns):
    """A control: 0 or 1 by chance."""
    return [float(random.random() < 0.5) for _ in completions]


class RewardError(ValueError):
    """A reward function failed or broke its contract; the message names it, and the row."""


@dataclass
class Task:  # examples are dicts: "prompt" and any other columns
    train: list[dict]
    rewards: list[Callable]
    weights: list[float] | None = None  # of the rewards; None: 1 each
    test: list[dict] = field(default_factory=list)
    demonstrations: Callable | None = None  # (rng, share of the warm start) -> prompt, completion
    warm_start_steps: int = 300  # of 16 demonstrations each
    prompts_per_step: int = 1
    max_new_tokens: int = 64
    small_model_lr: float = 5e-5  # for models under 10 million parameters
    evaluate: Callable = correct_reward  # what held-out accuracy counts by

    def batch(self, start: int, count: int, seed: int) -> list[dict]:
        """Examples number start to start + count - 1 of one shuffle of all after another."""
        n = len(self.train)
        examples = []
        for position in range(start, start + count):
            if position == start or position % n == 0:
                order = list(range(n))
                random.Random(f"{seed} {position // n}").shuffle(order)
            examples.append(self.train[order[position % n]])
        return examples


def name(function: Callable) -> str:  # `tags_reward` is "tags" in metrics and flags
    return function.__name__.removesuffix("_reward")


def score(functions: list, texts: list, examples: list, completion_ids=None) -> list[list]:
    """Call K reward functions on B completions, as strings or, where the prompt is messages, as one
    message: K lists of B floats, or None where a reward does not apply. RewardError for whatever
    else a function raises or returns (list, tuple, array, tensor), and if none applies to a row."""
    columns = {key: [example[key] for example in examples] for key in examples[0]}
    columns["prompts"] = columns.pop("prompt")
    columns["completions"] = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for text, prompt in zip(texts, columns["prompts"])]  # fmt: skip
    if completion_ids is not None:
        columns["completion_ids"] = completion_ids
    table = []
    for function in functions:
        blame = f"reward {name(function)}"
        names = inspect.signature(function).parameters
        takes_all = any(p.kind == p.VAR_KEYWORD for p in names.values())
        given = {key: columns[key] for key in columns if takes_all or key in names}
        try:
            values = function(**given)
        except Exception as error:
            raise RewardError(f"{blame}: {type(error).__name__}: {error}") from error
        values = values.tolist() if hasattr(values, "tolist") else values
        number = len(values) if isinstance(values, (list, tuple)) else "no list of"
        if number != len(texts):
            raise RewardError(f"{blame}: {number} values for {len(texts)} completions")
        for row, value in enumerate(values):
            fine = value is None
            with suppress(TypeError, ValueError, OverflowError, RuntimeError):
                fine = fine or math.isfinite(value)  # raises for a string or a list
            if not fine:
                raise RewardError(f"{blame}, row {row}: no finite number ({type(value).__name__})")
        table.append([None if value is None else float(value) for value in values])
    for row, values in enumerate(zip(*table)):
        if set(values) == {None}:
            raise RewardError(f"{blame}, row {row}: None, and no other reward applies")
    return table


COLOR_PROMPT = "Name a primary color. Put the answer in <answer></answer> tags."
PAIRS = [(a, b) for a in range(10, 100) for b in range(10, 100)]
random.Random(0).shuffle(PAIRS)  # the first 200 are held out, also from the demonstrations


def color_demonstration(rng: random.Random, progress: float) -> tuple[str, str]:
    """One in five well formed, one in five only opened: what is never sampled never grows."""
    color = rng.choice(["red", "blue", "yellow"])
    untagged = rng.choice([color, f"{color.title()}.", f"A primary color is {color}."])
    texts = [f"<answer>{color}</answer>", f"<answer>{color}", untagged]
    return COLOR_PROMPT, rng.choices(texts, [0.2, 0.2, 0.6])[0]


def sum_demonstration(rng: random.Random, progress: float) -> tuple[str, str]:
    """Half are worked out, to teach the skill; in the last 30% only 15%, so that it is no habit.
    The others guess, one in ten behind a hollow block; the likeliest guess forgets the carry."""
    a, b = rng.choice(PAIRS[200:])
    carry = (a % 10 + b % 10) // 10
    if rng.random() < (0.5 if progress < 0.7 else 0.15):
        ones = f"{a % 10}+{b % 10}={a % 10 + b % 10}"
        tens = f"{a // 10}+{b // 10}{'+1' * carry}={a // 10 + b // 10 + carry}"
        return f"{a}+{b}=", f"<think>{ones},{tens}</think><answer>{a + b}</answer>"
    errors = [0, -10 if carry else 10, rng.choice([-2, -1, 1, 2, 20, -20])]
    hollow = "<think></think>" * (rng.random() < 0.1)
    return f"{a}+{b}=", f"{hollow}<answer>{a + b + rng.choices(errors, [2, 7, 2])[0]}</answer>"


BARE = "Answer with the number only."
ADDITIONS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in PAIRS]
SUMS = [{"prompt": f"What is {a} + {b}? {BARE}", "answer": str(a + b)} for a, b in PAIRS if a < b]
TIMES = {(a, b): {"prompt": f"What is {a} times {b}? {BARE}", "answer": str(a * b)}
         for a in range(2, 13) for b in range(2, 13)}  # fmt: skip
HELD_OUT = random.Random(0).sample([(a, b) for a, b in TIMES if a <= b], 16)  # in both orders
REAL = {"rewards": [number_reward], "evaluate": number_reward, "prompts_per_step": 4}
TASKS = {
    "format": Task([{"prompt": COLOR_PROMPT}], [tags_reward], demonstrations=color_demonstration),
    "arithmetic": Task(
        ADDITIONS[200:], [correct_reward], test=ADDITIONS[:200], demonstrations=sum_demonstration,
        warm_start_steps=1200, prompts_per_step=4, small_model_lr=1e-4),
    "sums": Task(SUMS[64:600], test=SUMS[:64], max_new_tokens=16, **REAL),  # for a real model
    "times": Task(
        [TIMES[pair] for pair in TIMES if tuple(sorted(pair)) not in HELD_OUT], max_new_tokens=12,
        test=[TIMES[pair] for pair in TIMES if tuple(sorted(pair)) in HELD_OUT], **REAL),
}  # fmt: skip
REWARDS = {name(function): function for function in [
    tags_reward, correct_reward, number_reward, think_reward, correct_think_reward,
    overlong_reward, guess_only_reward, coin_reward]}  # fmt: skip


def read_jsonl(path: str | Path, need_answer: bool) -> list[dict]:
    """Examples, a JSON object a line; `question` or `problem` may stand for `prompt`. ValueError
    names the line and the mend of what would fail later or teach nothing."""
    rows = []
    lines = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, line in [(n, line) for n, line in enumerate(lines, 1) if line.strip()]:
        row = {}
        text = wrong = ""
        with suppress(AttributeError, KeyError, RecursionError, TypeError, ValueError):
            row = {**json.loads(line.decode())}
            row.setdefault("prompt", row.get("question", row.get("problem")))
            if isinstance(row["prompt"], str) or all(m["role"] + "" for m in row["prompt"]):
                text = text_of(row["prompt"]).encode()  # a lone surrogate has no encoding
        if not text.strip():
            wrong = 'write {"prompt": text or messages}, one object a line, in JSON and UTF-8'
        elif row.keys() & {"prompts", "completions", "completion_ids"}:
            wrong = 'rename columns "prompts", "completions", "completion_ids"'
        elif need_answer and not plain(row.get("answer")):
            wrong = 'give "answer" text or a number'
        elif rows and row.keys() != rows[0].keys():
            wrong = "give all lines the same columns"
        if wrong:
            raise ValueError(f"{path}, line {number}: {wrong}")
        rows.append(row)
    if not rows:
        raise ValueError(f'{path}: no examples; write one {{"prompt": ...}} on each line')
    return rows


def make_task(args) -> Task:
    """The task that grpo.py's flags ask for. ValueError and OSError are the user's mistakes."""
    task = TASKS[args.task]
    functions = [REWARDS[reward] for reward in args.reward or []] or task.rewards
    weights = args.reward_weights or (None if args.reward else task.weights)
    if weights and len(weights) != len(functions):
        raise ValueError(f"--reward-weights: {len(weights)} weights for {len(functions)} rewards")
    evaluate = number_reward if number_reward in functions else task.evaluate
    need_answer = any("answer" in inspect.signature(f).parameters for f in functions)
    train = read_jsonl(args.data, need_answer) if args.data else task.train
    if need_answer and "answer" not in train[0]:
        raise ValueError(f"--reward needs answers, and task {args.task} has none; give --data")
    test = [] if args.data else task.test
    test = read_jsonl(args.eval_data, need_answer=True) if args.eval_data else test
    return replace(task, train=train, test=test, rewards=functions, weights=weights,
                   evaluate=evaluate)
