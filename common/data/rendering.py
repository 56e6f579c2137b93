"""What a verifier's tokenizer and template add to a run, known before any row is used: the ids that
end an answer, and the day that prompts say.

A tokenizer's own end token, or the one that the template writes after an answer, may be missing in
config.json and generation_config.json. A server stops at the tokenizer's as well; here answers end
at both, and a line says so. A template that asks for today's date (`strftime_now`) gets one day
for the whole run, the day that the folder was begun on, however often it is resumed.
"""

import datetime
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.data.chat_template import ANSWER, Template
from common.data.conversations import RowError, messages_of
from common.data.settings import TemplateSettings
from common.data.sources import Row
from common.errors import UserError
from common.manifest import recorded
from common.progress import log
from common.verifier.config import Verifier
from common.verifier.files import optional_file, read_object


@dataclass(frozen=True)
class Rendering:
    """How prompts are rendered, and where answers end.

    template: loads it at the first call; end_ids: every id that ends an answer; not_served: those
    of them at which a server does not stop by itself.
    date: the day that the template is given; dated: whether prompts say it.
    """

    template: Callable[[], Template]
    end_ids: tuple[int, ...]
    not_served: tuple[int, ...]
    date: str
    dated: bool

    @property
    def settings(self) -> dict[str, Any]:
        """For the manifest: the day, where prompts say it."""
        return {"date": self.date} if self.dated else {}


def rendering_of(
    settings: TemplateSettings,
    verifier: Verifier,
    rows: Iterable[Row],
    answers: Iterable[Path] = (),
) -> Rendering:
    """How these rows are rendered; logs what the user would not expect.

    Args:
        rows: the template is loaded if one of them is a conversation.
        answers: files whose folders may say the day of their prompts.
    """
    out = Path(settings.output_dir)
    days = {
        folder: day
        for folder in dict.fromkeys(file.parent for file in answers)
        if (day := recorded_day(folder))
    }
    earlier = None if settings.overwrite else recorded_day(out)
    known = [settings.date, earlier, *days.values(), datetime.date.today().isoformat()]
    date = next(day for day in known if day)
    ends = served = with_tokenizers_end(verifier)
    where = settings.model_path, settings.trust_remote_code
    template = functools.cache(
        lambda: load_template(*where, served, settings.template_args, date)
    )  # fmt: skip
    dated = False
    if has_conversation(rows):
        ends, dated = template().end_ids, renders_date(template())
    for token in ends[len(served) :]:
        log(
            f"note: the chat template ends answers with {template().tokenizer.decode([token])}"
            f" (id {token}), which neither config.json, generation_config.json nor the tokenizer"
            " name as an end; answers end there (a server needs it among its stop_token_ids)"
        )
    if settings.date and not dated:
        log("note: --date has no effect: no prompt says the day")
    for folder, day in days.items():
        if dated and day != date:
            log(
                f"note: prompts say {date}, those in {folder} {day} (--date {day} makes them alike)"
            )
    return Rendering(template, ends, ends[len(served) :], date, dated)


def recorded_day(folder: Path) -> str | None:
    """The day that a folder's manifest has; None for none, or a damaged one."""
    try:
        return datetime.date.fromisoformat(recorded(folder, "settings", "date")).isoformat()
    except (TypeError, ValueError):
        return None


def has_conversation(rows: Iterable[Row]) -> bool:
    """Whether one of the rows needs the template."""
    for row in rows:
        if "input_ids" in row.value or "loss_mask" in row.value:
            continue
        try:
            messages_of(row.value, row.form)
        except RowError:
            continue
        return True
    return False


# ---------------------------------------------------------------- tokenizer and template


@functools.cache
def load_tokenizer(model_path: str, trust_remote_code: bool) -> Any:
    """Load the verifier's tokenizer; code that ships with it runs only with trust_remote_code."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    except Exception as e:  # missing files, remote code without the flag, hub errors
        text = " ".join(str(e).split())[:300]
        if "trust_remote_code" in str(e):
            text = (
                "its tokenizer is Python code that ships with the model; pass --trust-remote-code"
            )
        raise UserError(f"--model-path {model_path}: cannot load the tokenizer: {text}") from None
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(f"--model-path {model_path}: its tokenizer has no chat template")
    return tokenizer


def load_template(
    model_path: str,
    trust_remote_code: bool,
    end_ids: tuple[int, ...],
    options: dict[str, Any],
    date: str | None,
) -> Template:
    """The template of a verifier's tokenizer, whose end_ids are these and the one that it writes
    after an answer; see load_tokenizer and Template."""
    template = Template(load_tokenizer(model_path, trust_remote_code), end_ids, options, date)
    written = written_end(template)
    if written is None:
        return template
    return Template(template.tokenizer, (*end_ids, written), options, date)


# ---------------------------------------------------------------- where answers end


def with_tokenizers_end(verifier: Verifier) -> tuple[int, ...]:
    """The verifier's end_ids and the tokenizer's own end token, at all of which vLLM's server
    stops; says so where they lack it. Read from the tokenizer's files, whose code is not run."""
    named: Any = None
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = optional_file(verifier.path, name)
        named = named or (read_object(path).get("eos_token") if path else None)
    text = named.get("content") if isinstance(named, dict) else named
    token = id_of(verifier.path, text) if isinstance(text, str) else None
    if token is None or token in verifier.end_ids or token >= verifier.vocab_size:
        return verifier.end_ids
    listed = ", ".join(map(str, verifier.end_ids)) or "none"
    log(
        f"note: the tokenizer's end token {text} (id {token}) is not among the eos_token_id of"
        f" config.json and generation_config.json ({listed}); answers end there too, as in a server"
    )
    return (*verifier.end_ids, token)


def id_of(model_path: str, token: str) -> int | None:
    """The id of a token by the tokenizer's files; None where they do not tell it."""
    config = optional_file(model_path, "tokenizer_config.json")
    added = read_object(config).get("added_tokens_decoder") if config else None
    for number, entry in (added or {}).items():
        if isinstance(entry, dict) and entry.get("content") == token and number.isdecimal():
            return int(number)
    path = optional_file(model_path, "tokenizer.json")
    if path is None:
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path)).token_to_id(token)
    except Exception as e:  # the library raises no other kind
        raise UserError(f"{path}: not readable ({e}); download the file again") from None


def written_end(template: Template) -> int | None:
    """The special token that the template writes after an answer, where none of the end_ids
    follows it."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": ANSWER}]
    try:
        after = template.ids(template.render(messages, False).partition(ANSWER)[2])
    except RowError:
        return None
    tokenizer = template.tokenizer
    first = next((i for i in after if tokenizer.decode([i]).strip()), None)
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    return first if first in special and not set(after) & set(template.end_ids) else None


# ---------------------------------------------------------------- the day that prompts say


def renders_date(template: Template) -> bool:
    """Whether the template asks for today's date, in a prompt with a system message or tools or
    without."""
    user, system = {"role": "user", "content": "x"}, {"role": "system", "content": "x"}
    tool = {"name": "f", "description": "f", "parameters": {"type": "object", "properties": {}}}
    template.asked_date = False
    for messages in ([user], [system, user]):
        for tools in (None, [{"type": "function", "function": tool}]):
            try:
                template.render(messages, True, tools)
            except RowError:
                continue
    return template.asked_date


def check_servers_day(rendering: Rendering, given: str | None) -> None:
    """UserError where a server, which renders its own day, cannot render the one given; a note
    where it continues answers of another day."""
    today = datetime.date.today().isoformat()
    if not rendering.dated or rendering.date == today:
        return
    if given:
        raise UserError(
            f"--date {given}: a server renders its own day ({today}) into prompts; leave out"
            " --date, or --endpoint"
        )
    log(f"note: the server renders its own day ({today}); prompts so far say {rendering.date}")
