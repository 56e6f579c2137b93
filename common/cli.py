"""Flags and the verifier's YAML.

Imported before torch, vllm or transformers, so that ``--help`` and a wrong flag
answer at once. Values come from, in rising order: the flag's default, the YAML's
``common`` section, the script's own section, the command line.
"""

import argparse
import dataclasses
import datetime
import json
import math
import os
import re
import reprlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from common import streams
from common.errors import nearest, report_error

SECTIONS = ("common", "regenerate", "prepare", "vocab", "extract", "train", "evaluate")

# Keys of the YAML's `common` section: read by every script that has the flag.
COMMON_KEYS = ("model_path", "max_seq_len", "layers", "seed", "trust_remote_code")
MOST = sys.maxsize  # of a whole number
# What every chat template is given, or says how it is rendered.
TEMPLATE_GIVEN = {
    "messages", "conversation", "tools", "add_generation_prompt", "continue_final_message",
    "chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip
T = TypeVar("T")


def json_object(given: str | dict) -> dict:
    """Argparse type of flags that take a JSON object (a mapping in the YAML)."""
    try:
        value = json.loads(given) if isinstance(given, str) else given
        check_json(value, "the value")
    except RecursionError:
        raise argparse.ArgumentTypeError("is nested too deeply") from None
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"not JSON: {e}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value


def check_json(value: Any, name: str) -> None:
    """ArgumentTypeError naming the key whose value a manifest would not give back as it is: YAML
    knows more types than JSON, and Python reads numbers that JSON does not have."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise argparse.ArgumentTypeError(f"the key {key} is no text; put it in quotes")
            check_json(item, key)
    elif isinstance(value, list):
        for item in value:
            check_json(item, name)
    elif isinstance(value, float) and not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{name} is {value}, which JSON does not have")
    elif not isinstance(value, str | int | float | None):
        kind = type(value).__name__
        raise argparse.ArgumentTypeError(f"{name} is a {kind}; put it in quotes")


def template_args(given: str | dict) -> dict:
    """Argparse type: a chat template's own variables, not those that every template is given."""
    value = json_object(given)
    for key in value.keys() & TEMPLATE_GIVEN:
        raise argparse.ArgumentTypeError(f"{key} is no variable of the template's own")
    return value


def integer(low: int, high: int = MOST) -> Callable[[str], int]:
    """Argparse type: a whole number from `low` (at least 0) to `high`."""

    def number(text: str) -> int:
        value = int(text[:20]) if text.isascii() and text.isdigit() else -1
        if not low <= value <= high:
            lower = high == MOST and value < low
            limits = f"of at least {low}" if lower else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{reprlib.repr(text)} is not a whole number {limits}")
        return value

    return number


non_negative_int = integer(0)
positive_int = integer(1)


def between(low: float, high: float) -> Callable[[str], float]:
    """Argparse type: a number from `low` to `high` (so never NaN or infinite)."""

    def number(text: str) -> float:
        try:
            value = float(text if text.isascii() and "_" not in text else "nan")
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"{reprlib.repr(text)} is not a number from {low:g} to {high:g}"
            )
        return value

    return number


def iso_date(text: str) -> str:
    """Argparse type: a day."""
    try:
        if not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
            raise ValueError
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a day as YYYY-MM-DD") from None


def path_text(text: str) -> str:
    """A path; not the empty one of an unset variable, which would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("is empty")
    if "\0" in text:
        raise argparse.ArgumentTypeError("holds a NUL character")
    return text


def as_settings(args: argparse.Namespace, kind: type[T]) -> T:
    """The parsed flags as the script's settings: a dataclass with one field per flag."""
    return kind(**{f.name: getattr(args, f.name) for f in dataclasses.fields(kind)})  # type: ignore[arg-type]


# Flags that mean the same in every script.
COMMON_FLAGS: dict[str, dict[str, Any]] = {
    "--model-path": dict(type=path_text, metavar="DIR", help="verifier: local folder or hub name"),
    "--prepared-data": dict(
        type=path_text,
        metavar="PATH",
        help="folder written by 01, or the tokenized_data.jsonl in it",
    ),
    "--output-dir": dict(type=path_text, metavar="DIR", help="folder this stage writes"),
    "--hidden-states": dict(type=path_text, metavar="DIR", help="folder written by 03"),
    "--vocab-map": dict(type=path_text, metavar="DIR", help="folder written by 02"),
    "--max-samples": dict(type=positive_int, metavar="N", help="use the first N samples"),
    "--max-seq-len": dict(
        type=positive_int, default=2048, metavar="TOKENS", help="longest sample, in tokens"
    ),
    "--layers": dict(
        type=non_negative_int,
        nargs="+",
        metavar="I",
        help="layers captured, 0-based (default 2, n//2, n-3, n-1)",
    ),
    "--template-args": dict(
        type=template_args,
        default={},
        metavar="JSON",
        help='variables of the chat template, as {"enable_thinking": false}',
    ),
    "--date": dict(
        type=iso_date,
        metavar="YYYY-MM-DD",
        help="today for a chat template that says it (default: the run's first day)",
    ),
    "--tp-size": dict(
        type=positive_int, default=1, metavar="GPUS", help="tensor-parallel size in vLLM"
    ),
    "--gpu-memory-utilization": dict(
        type=between(0.01, 1), default=0.9, metavar="FRACTION", help="of a GPU's memory, for vLLM"
    ),
    "--dtype": dict(
        default="auto",
        choices=["auto", "bfloat16", "float16", "float32"],
        help="of the verifier in vLLM",
    ),
    "--engine-args": dict(
        type=json_object, default={}, metavar="JSON", help="more arguments of vLLM's engine"
    ),
    "--load-timeout": dict(
        type=between(0.01, 10_000),
        default=120,
        metavar="MINUTES",
        help="give up on a verifier that takes longer to load",
    ),
    "--seed": dict(
        type=integer(0, 2**32 - 1),
        default=0,
        help="seed of what is random (nothing is in 01, 02 and 03)",
    ),
    "--dry-run": dict(action="store_true", help="check everything, print the plan, stop"),
    "--overwrite": dict(action="store_true", help="replace what the output folder holds"),
    "--trust-remote-code": dict(
        action="store_true", help="run Python code that ships with the verifier, if any"
    ),
}
ALIASES = {"--prepared-data": ("--data-path",)}


class Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Docstrings as they are, and flags with their defaults where these say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, {}, argparse.SUPPRESS) or "default" in str(action.help):
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Argparse without abbreviations, whose error is a single last line."""

    def __init__(self, section: str, doc: str | None):
        prog = os.path.relpath(sys.argv[0]) if sys.argv[0] else ""
        super().__init__(prog=prog, description=doc, allow_abbrev=False, formatter_class=Help)
        self.section = section
        self.needed: list[str] = []
        if section in SECTIONS:
            self.add_argument(
                "--config", type=path_text, metavar="YAML", help="the verifier's YAML (configs/)"
            )

    def error(self, message: str) -> NoReturn:
        streams.print_now(f"see: python {self.prog} --help", sys.stderr)
        report_error(message)
        sys.exit(2)

    def need(self, *flags: str) -> None:
        """Name the flags that must have a value from the YAML or the command line."""
        self.needed += flags

    def add_switch(self, flag: str, default: bool | None, text: str) -> None:
        """Add a flag and its --no- form."""
        self.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=text)

    def add_common(self, *names: str) -> None:
        """Add some of COMMON_FLAGS."""
        for name in names:
            self.add_argument(name, *ALIASES.get(name, ()), **COMMON_FLAGS[name])

    def parse(self) -> argparse.Namespace:
        """Merge YAML and command line; exits with 2 on anything unknown or missing."""
        config = None
        if self.section in SECTIONS:
            peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
            peek.add_argument("--config", nargs="?")
            config = peek.parse_known_args()[0].config
        if config and not {"-h", "--help"} & set(sys.argv[1:]):
            self.set_defaults(**self.yaml_values(Path(config)))
        args, unknown = self.parse_known_args()
        if unknown:
            options = [o for a in self._actions for o in a.option_strings]
            word = next((u for u in unknown if u.startswith("-")), unknown[0])
            self.error(f"unknown flag {word}{nearest(word.split('=')[0], options)}")
        for flag in self.needed:
            key = flag.lstrip("-").replace("-", "_")
            if getattr(args, key) is None:
                where = f"{config}: missing key {key}; " if config else ""
                yaml = f" (or `{key}:` in the YAML)" if self.section in SECTIONS else ""
                self.error(f"{where}{flag} is required{yaml}")
        return args

    def yaml_values(self, path: Path) -> dict[str, Any]:
        """Return the values of `common` and this script's section, checked as flags are."""
        flags = {a.dest: a for a in self._actions if a.dest not in ("help", "config")}
        values: dict[str, Any] = {}
        for section, keys in sorted(self.read_yaml(path).items(), key=lambda x: x[0] != "common"):
            if section not in SECTIONS:
                self.error(
                    f"{path}: unknown section {section}{nearest(str(section), list(SECTIONS))}"
                )
            if keys is not None and not isinstance(keys, dict):
                self.error(f"{path}: section {section} is not a mapping of keys to values")
            if section not in ("common", self.section):
                continue
            known = list(COMMON_KEYS if section == "common" else flags)
            for key, value in (keys or {}).items():
                if key not in known:
                    self.error(f"{path}: unknown key {section}.{key}{nearest(str(key), known)}")
                if key in flags and value is not None:
                    values[key] = self.convert(flags[key], value, f"{path}: {section}.{key}")
        return values

    def read_yaml(self, path: Path) -> dict:
        """The sections of a YAML; exits with 2 on one that cannot be read."""
        import yaml

        class Loader(yaml.SafeLoader):
            """Refuses a key that is there twice, of which yaml takes the last."""

            def construct_mapping(self, node, deep=False):
                keys = [key.value for key, _ in node.value]
                for key in keys:
                    if keys.count(key) > 1:
                        raise yaml.YAMLError(f"{key} is there twice, {node.start_mark}")
                return super().construct_mapping(node, deep)

        # 1e-5, a number to everybody else, is text to YAML 1.1
        exponent = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
        Loader.add_implicit_resolver("tag:yaml.org,2002:float", exponent, list("-+0123456789"))
        try:
            sections = yaml.load(path.read_text(encoding="utf-8"), Loader)
        except OSError as e:
            self.error(f"--config {path}: {e.strerror}")
        except (yaml.YAMLError, ValueError) as e:  # of its bytes, a date or a number
            self.error(f"{path}: not YAML: {' '.join(str(e).split())}")
        except RecursionError:
            self.error(f"{path}: not YAML: it is nested too deeply")
        if not isinstance(sections, dict):
            self.error(f"{path}: expected sections {', '.join(SECTIONS)}")
        return sections

    def convert(self, action: argparse.Action, value: Any, where: str) -> Any:
        """Give a YAML value the type that its flag would have."""
        if isinstance(action, argparse.BooleanOptionalAction | argparse._StoreTrueAction):
            if not isinstance(value, bool):
                self.error(f"{where}: expected true or false, found {value!r}")
            return value
        many = action.nargs in ("+", "*")
        if many != isinstance(value, list):
            self.error(f"{where}: expected {'a list' if many else 'one value'}, found {value!r}")
        kind: Callable = action.type if callable(action.type) else str
        if value == []:
            self.error(f"{where}: the list is empty; leave the key out for the default")
        out, takes_mapping = [], (json_object, template_args)
        for item in value if many else [value]:
            if isinstance(item, list) or (isinstance(item, dict) and kind not in takes_mapping):
                self.error(f"{where}: expected one value, found {item!r}")
            try:
                item = kind(item if isinstance(item, dict) else str(item))
            except (ValueError, argparse.ArgumentTypeError) as e:
                self.error(f"{where}: {e}")
            if action.choices is not None and item not in action.choices:
                self.error(f"{where}: {item!r} is not one of {', '.join(map(str, action.choices))}")
            out.append(item)
        return out if many else out[0]
