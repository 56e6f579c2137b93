"""Flags, the verifier's YAML, and the one-line errors every script ends with.

Imported before torch, vllm or transformers, so that ``--help`` and a wrong flag
answer at once. Values come from, in rising order: the flag's default, the YAML's
``common`` section, the script's own section, the command line.
"""

import argparse
import contextlib
import difflib
import errno
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TextIO

SECTIONS = ("common", "regenerate", "prepare", "vocab", "extract", "train", "evaluate")

# Keys of the YAML's `common` section: read by every script that has the flag.
COMMON_KEYS = ("model_path", "max_seq_len", "layers", "seed", "trust_remote_code")


class UserError(Exception):
    """A mistake or fault the user can act on; its text is one line with the remedy."""


class Interrupted(BaseException):
    """Raised after SIGTERM or SIGINT; `code` is the exit status. Not an Exception, so that no
    handler of a library's faults takes it for one."""

    def __init__(self, code: int, text: str):
        super().__init__(text)
        self.code = code


def nearest(word: str, known: list[str]) -> str:
    """Return `; did you mean X?` for the most similar known word, or nothing."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def json_object(text: str | dict) -> dict:
    """Argparse type of flags that take a JSON object (a mapping in the YAML)."""
    if isinstance(text, dict):
        if not all(isinstance(key, str) for key in text):
            raise argparse.ArgumentTypeError("its keys are not all text")
        return text
    try:
        value = json.loads(text)
    except json.JSONDecodeError as e:
        raise argparse.ArgumentTypeError(f"not JSON: {e}") from None
    except RecursionError:
        raise argparse.ArgumentTypeError("is nested too deeply") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value


def seed(text: str) -> int:
    """Argparse type: a number that every generator takes."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2^32 - 1")
    return value


def whole_number(text: str) -> int:
    """Argparse type: a whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def positive_int(text: str) -> int:
    """Argparse type: a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def between(low: float, high: float) -> Callable[[str], float]:
    """Argparse type: a number from `low` to `high` (so never NaN or infinite)."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low:g} to {high:g}")
        return value

    return number


def counted(high: int) -> Callable[[str], int]:
    """Argparse type: a whole number from 1 to `high`."""

    def number(text: str) -> int:
        value = positive_int(text)
        if value > high:
            raise argparse.ArgumentTypeError(f"{text!r} is over {high}")
        return value

    return number


def weight_of(value: str, where: str) -> float:
    """The number of a `weight=..` option; UserError for one that is no share."""
    try:
        weight = float(value)
    except ValueError:
        weight = 0.0
    if not 0 < weight < float("inf"):
        raise UserError(f"{where}: weight is a number over 0")
    return weight


def path_text(text: str) -> str:
    """A path; not the empty one of an unset variable, which would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("is empty")
    return text


DTYPES = ["auto", "bfloat16", "float16", "float32"]


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
        super().__init__(
            prog=prog,
            description=doc,
            allow_abbrev=False,
            formatter_class=Help,
        )
        self.section = section
        self.needed: list[str] = []
        if section in SECTIONS:
            self.add_argument("--config", metavar="YAML", help="the verifier's YAML (configs/)")

    def error(self, message: str) -> NoReturn:
        print(f"see: python {self.prog} --help", file=sys.stderr)
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)

    def need(self, *flags: str) -> None:
        """Name the flags that must have a value from the YAML or the command line."""
        self.needed += flags

    def flags(self) -> dict[str, argparse.Action]:
        return {a.dest: a for a in self._actions if a.option_strings and a.dest != "help"}

    def add_switch(self, flag: str, default: bool | None, text: str) -> None:
        """Add a flag and its --no- form."""
        self.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=text)

    def add_common(self, *names: str) -> None:
        """Add flags that mean the same in every script."""
        texts: dict[str, dict[str, Any]] = {
            "--model-path": dict(
                type=path_text, metavar="DIR", help="verifier: local folder or hub name"
            ),
            "--output-dir": dict(type=path_text, metavar="DIR", help="folder this stage writes"),
            "--hidden-states": dict(type=path_text, metavar="DIR", help="folder written by 03"),
            "--vocab-map": dict(type=path_text, metavar="DIR", help="folder written by 02"),
            "--max-samples": dict(type=positive_int, metavar="N", help="use the first N samples"),
            "--max-seq-len": dict(
                type=positive_int, default=2048, metavar="TOKENS", help="longest sample, in tokens"
            ),
            "--layers": dict(
                type=int,
                nargs="+",
                metavar="I",
                help="layers captured, 0-based (default 2, n//2, n-3, n-1)",
            ),
            "--template-args": dict(
                type=json_object,
                default={},
                metavar="JSON",
                help='variables of the chat template, as {"enable_thinking": false}',
            ),
            "--tp-size": dict(
                type=positive_int, default=1, metavar="GPUS", help="tensor-parallel size in vLLM"
            ),
            "--gpu-memory-utilization": dict(
                type=between(0.01, 1),
                default=0.9,
                metavar="FRACTION",
                help="of a GPU's memory, for vLLM",
            ),
            "--dtype": dict(default="auto", choices=DTYPES, help="of the verifier in vLLM"),
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
                type=seed, default=0, help="seed of what is random (nothing is in 01, 02 and 03)"
            ),
            "--dry-run": dict(action="store_true", help="check everything, print the plan, stop"),
            "--overwrite": dict(action="store_true", help="replace what the output folder holds"),
            "--trust-remote-code": dict(
                action="store_true", help="run Python code that ships with the verifier, if any"
            ),
        }
        for name in names:
            if name == "--prepared-data":
                self.add_argument(
                    "--prepared-data",
                    "--data-path",
                    type=path_text,
                    metavar="PATH",
                    help="folder written by 01, or the tokenized_data.jsonl in it",
                )
            else:
                self.add_argument(name, **texts[name])

    def parse(self, argv: list[str] | None = None) -> argparse.Namespace:
        """Merge YAML and command line; exits with 2 on anything unknown or missing."""
        argv = sys.argv[1:] if argv is None else argv
        peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        peek.add_argument("--config", nargs="?")
        config = peek.parse_known_args(argv)[0].config if self.section in SECTIONS else None
        if config and not {"-h", "--help"} & set(argv):
            self.set_defaults(**self.read_yaml(Path(config)))
        args, unknown = self.parse_known_args(argv)
        if unknown:
            options = [o for a in self._actions for o in a.option_strings]
            word = next((u for u in unknown if u.startswith("-")), unknown[0])
            self.error(f"unknown flag {word}{nearest(word.split('=')[0], options)}")
        for flag in self.needed:
            if getattr(args, flag.lstrip("-").replace("-", "_")) is None:
                key = flag.lstrip("-").replace("-", "_")
                where = f"{config}: missing key {key}; " if config else ""
                yaml = f" (or `{key}:` in the YAML)" if self.section in SECTIONS else ""
                self.error(f"{where}{flag} is required{yaml}")
        return args

    def read_yaml(self, path: Path) -> dict[str, Any]:
        """Return the values of `common` and this script's section, checked as flags are."""
        import yaml

        class Loader(yaml.SafeLoader):
            """Refuses a key that is there twice, of which yaml takes the last."""

            def construct_mapping(self, node, deep=False):
                keys = [key.value for key, _ in node.value]
                for key in keys:
                    if keys.count(key) > 1:
                        raise yaml.YAMLError(f"{key} is there twice, {node.start_mark}")
                return super().construct_mapping(node, deep)

        try:
            text = yaml.load(path.read_text(encoding="utf-8"), Loader)
        except OSError as e:
            self.error(f"--config {path}: {e.strerror}")
        except (yaml.YAMLError, UnicodeDecodeError) as e:
            self.error(f"{path}: not YAML: {' '.join(str(e).split())}")
        except RecursionError:
            self.error(f"{path}: not YAML: it is nested too deeply")
        if not isinstance(text, dict):
            self.error(f"{path}: expected sections {', '.join(SECTIONS)}")
        flags = self.flags()
        values: dict[str, Any] = {}
        for section, keys in sorted(text.items(), key=lambda x: x[0] != "common"):
            if section not in SECTIONS:
                self.error(
                    f"{path}: unknown section {section}{nearest(str(section), list(SECTIONS))}"
                )
            if keys is not None and not isinstance(keys, dict):
                self.error(f"{path}: section {section} is not a mapping of keys to values")
            if section not in ("common", self.section):
                continue
            known = list(COMMON_KEYS if section == "common" else flags.keys() - {"config"})
            for key, value in (keys or {}).items():
                if key not in known:
                    self.error(f"{path}: unknown key {section}.{key}{nearest(str(key), known)}")
                if key in flags and value is not None:
                    values[key] = self.convert(flags[key], value, f"{path}: {section}.{key}")
        return values

    def convert(self, action: argparse.Action, value: Any, where: str) -> Any:
        """Give a YAML value the type that its flag would have."""
        if isinstance(action, argparse.BooleanOptionalAction | argparse._StoreTrueAction):
            if not isinstance(value, bool):
                self.error(f"{where}: expected true or false, found {value!r}")
            return value
        many = action.nargs in ("+", "*") or isinstance(action, argparse._AppendAction)
        if many != isinstance(value, list):
            self.error(f"{where}: expected {'a list' if many else 'one value'}, found {value!r}")
        kind: Callable = action.type if callable(action.type) else str
        if value == []:
            self.error(f"{where}: the list is empty; leave the key out for the default")
        out = []
        for item in value if many else [value]:
            if isinstance(item, list) or (isinstance(item, dict) and kind is not json_object):
                self.error(f"{where}: expected one value, found {item!r}")
            try:
                item = kind(item if isinstance(item, dict) else str(item))
            except (ValueError, argparse.ArgumentTypeError) as e:
                self.error(f"{where}: {e}")
            if action.choices is not None and item not in action.choices:
                self.error(f"{where}: {item!r} is not one of {', '.join(map(str, action.choices))}")
            out.append(item)
        return out if many else out[0]


def tell(text: str, stream: TextIO) -> None:
    """Print one line now, if it can be: a log whose reader is gone (`| tee` after a hang-up) or
    whose disk is full must not end a run that has hours of work in memory."""
    with contextlib.suppress(OSError):
        print(text, file=stream, flush=True)


def finish(status: int) -> NoReturn:
    """Flush both streams and leave, with nothing printed by library threads after us."""
    for stream in sys.stdout, sys.stderr:
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


def run(main: Callable[[], None]) -> NoReturn:
    """Run a script's main and end with its result or a one-line error as the last line.

    Exit status: 0 done, 1 a fault (UserError, I/O error, anything unexpected),
    2 a wrong flag, 130 / 143 after SIGINT / SIGTERM.
    """
    signal.signal(signal.SIGTERM, _terminated)
    open_streams()
    try:
        main()
    except SystemExit as e:  # a wrong flag or --help
        finish(e.code if isinstance(e.code, int) else 1)
    except Interrupted as e:
        report_error(f"interrupted: {e}")
        finish(e.code)
    except KeyboardInterrupt:
        report_error(f"interrupted; {again()} to continue from what is saved")
        finish(130)
    except UserError as e:
        report_error(str(e))
        finish(1)
    except ModuleNotFoundError as e:
        report_error(f"the package {e.name} is not installed; use the environment of the README")
        finish(1)
    except OSError as e:
        report_error(os_error_text(e))
        finish(1)
    except Exception as e:  # a bug or a library's fault: show all of it, then one line
        if type(e).__name__ == "OutOfMemoryError":
            report_error(
                f"out of GPU memory; end what else is on the GPU (nvidia-smi), then {again()};"
                " where nothing is, --max-batch-tokens and --batch-size ask for too much"
            )
            finish(1)
        traceback.print_exc()
        report_error(one_line(e, 500))
        finish(1)
    finish(0)


def open_streams() -> None:
    """Make printing safe: a closed stream swallows, a narrow encoding escapes; neither may end
    a run, or make one that succeeded look failed."""
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w" if name != "stdin" else "r"))  # noqa: SIM115
        elif name != "stdin" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _terminated(_signal: int, _frame: object) -> None:
    """SIGTERM while nothing can be saved (checks, loading); a Stopper replaces this."""
    raise Interrupted(143, f"SIGTERM; {again()} to continue from what is saved")


def one_line(e: BaseException, most: int = 300) -> str:
    """An exception's type and the beginning of its text, on one line."""
    return f"{type(e).__name__}: {' '.join(str(e).split())[:most]}"


def again() -> str:
    """What goes on with a run that has ended early; the same with --overwrite would begin anew."""
    without = ", without --overwrite," if "--overwrite" in sys.argv else ""
    return f"run the same command again{without}"


def report_error(text: str) -> None:
    tell(f"error: {' '.join(text.split())}", sys.stderr)


def os_error_text(e: OSError) -> str:
    """One line for an I/O error, with what to do about it."""
    remedy = {
        errno.ENOSPC: f"free space or choose another --output-dir, then {again()}",
        errno.EDQUOT: f"the disk quota is used up; free space, then {again()}",
        errno.EACCES: "check the folder's permissions or choose another --output-dir",
        errno.EROFS: "the file system is read-only; choose another --output-dir",
    }.get(e.errno or 0, "")
    where = f"{e.filename}: " if e.filename else ""
    return f"{where}{e.strerror or e}{'; ' + remedy if remedy else ''}"
