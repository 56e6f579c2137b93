"""What a run of 03 captures, and the batches it has to do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.data.samples import Sample
from common.extraction.batching import MAX_SAMPLES_PER_BATCH, Batch
from common.extraction.settings import ExtractSettings
from common.manifest import Output
from common.states.files import StatesFormat, file_bytes
from common.states.journal import Entry, Plan
from common.tensor_files import DTYPES, ITEM_BYTES
from common.verifier.config import Verifier
from common.verifier.head import read_head_manifest
from common.verifier.tensors import tied

SampleIds = tuple[int, np.ndarray]  # a sample's index and its token ids, int32 [T]


@dataclass(frozen=True)
class Capture:
    """What is captured of a verifier.

    layers: 0-based, ascending; verifier_dtype: in which vLLM computes; form: of the files.
    """

    verifier: Verifier
    layers: list[int]
    verifier_dtype: str
    form: StatesFormat

    def manifest_settings(self, settings: ExtractSettings) -> dict[str, Any]:
        """What gives the folder's files their meaning; a resume must have the same."""
        values = {
            "layers": self.layers,
            "layer_convention": "output",
            "hidden_size": self.form.hidden_size,
            "dtype": self.form.dtype,
            "verifier_dtype": self.verifier_dtype,
            "max_samples": settings.max_samples,
            # Batch layout moves low bits: a resume must keep it.
            "max_batch_tokens": settings.max_batch_tokens,
            "batch_size": min(settings.batch_size, MAX_SAMPLES_PER_BATCH),
            "tp_size": settings.tp_size,
            "engine_args": settings.engine_args,
        }
        if settings.num_shards > 1:
            values["shard"] = [settings.shard_index, settings.num_shards]
        return values


@dataclass(frozen=True)
class Work:
    """The folder that a run fills, and what is left to do in it.

    plan: of the complete folder; done: its finished batches, by number, to which a run adds; todo:
    the batches to run; samples: of `probed`, by index; max_batch_tokens: of one forward pass;
    complete: an earlier run has finished the folder; at most the verifier's head is missing.
    """

    capture: Capture
    output: Output
    plan: Plan
    done: dict[int, Entry]
    todo: list[Batch]
    samples: dict[int, Sample]
    max_batch_tokens: int
    complete: bool

    @property
    def out(self) -> Path:
        return self.output.folder

    @property
    def head_folder(self) -> Path:
        """Where the verifier's head lies: beside the states, of shards beside all of them."""
        return self.out.parent if "shard" in self.output.stage.settings else self.out

    @property
    def has_head(self) -> bool:
        """Whether the head of this verifier, in the dtype that it computes in, is there."""
        found = None if self.output.overwrite else read_head_manifest(self.head_folder)
        return found is not None and (found.verifier_weights, found.facts.dtype) == (
            self.output.stage.inputs["verifier_weights"],
            self.capture.verifier_dtype,
        )

    @property
    def head_bytes(self) -> int:
        """Bytes on disk of the head still to write, and of the file that it may replace."""
        if self.has_head:
            return 0
        tensors = 1 if tied(self.capture.verifier) else 2
        verifier, size = self.capture.verifier, ITEM_BYTES[DTYPES[self.capture.verifier_dtype]]
        return tensors * verifier.vocab_size * verifier.hidden_size * size

    @property
    def probed(self) -> list[Batch]:
        """The batches whose samples the self-check takes: those to run, or, in a complete folder
        that lacks the verifier's head, the first."""
        return self.todo or [Batch(0, self.plan.batches[0])]

    @property
    def todo_bytes(self) -> int:
        """Bytes on disk of the files still to write."""
        return sum(
            file_bytes(self.plan.lengths[i], self.capture.form)
            for batch in self.todo
            for i in batch.indices
        )

    def inputs(self, indices: list[int], longest: int | None = None) -> list[SampleIds]:
        """The samples' token ids, cut to `longest` tokens."""
        return [(i, self.samples[i].input_ids[:longest]) for i in indices]

    def tokens(self, indices: list[int]) -> int:
        return sum(len(self.samples[i].input_ids) for i in indices)
