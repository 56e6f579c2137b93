"""Which modules of the model that vLLM has loaded are the verifier's decoder.

Nothing here goes by a family's names: the layers are a list of as many modules as config.json
says, the text model is the innermost module round them that also embeds the vocabulary, and the
final norm stands beside the layers in it. Wrappers (multimodal, the Transformers backend) only add
to the path before it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from common.errors import UserError


@dataclass(frozen=True)
class Decoder:
    """The text model inside vLLM's model, and its parts; the names are dotted, from vLLM's model.

    model: holds the others; norm: the final norm, which runs after the layers.
    """

    path: str
    model: nn.Module
    embedding_path: str
    embedding: nn.Module
    layers_path: str
    layers: nn.ModuleList
    norm_path: str
    norm: nn.Module


def find_decoder(model: nn.Module, num_layers: int) -> Decoder:
    """Find the decoder of `num_layers` layers; UserError, naming the class and its modules, where
    there is none."""
    lists = {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, nn.ModuleList) and len(m) == num_layers
    }
    found = []
    for layers_path, layers in lists.items():
        if any(layers_path.startswith(f"{outer}.") for outer in lists):
            continue  # a list inside a layer, of experts, say
        for levels, path in enumerate(outwards(layers_path)):
            embeddings = vocabulary_embeddings(model.get_submodule(path), layers)
            if embeddings:
                size = sum(p.numel() for p in layers.parameters())
                found.append((levels, -size, path, layers_path, embeddings[0]))
                break
    if not found:
        raise UserError(
            f"cannot find the {num_layers} decoder layers and their embedding in"
            f" {type(model).__name__}; its modules are {outline(model)}"
        )
    # A vision tower's layers are further from the embedding, a list of small parts is smaller.
    _, _, path, layers_path, embedding = min(found)
    text = model.get_submodule(path)
    norm = final_norm(text, layers_path.removeprefix(path).lstrip("."))
    if norm is None:
        raise UserError(
            f"cannot tell the final norm of {type(model).__name__}: beside the layers"
            f" {layers_path}, {type(text).__name__} has {outline(text)}"
        )
    return Decoder(
        path,
        text,
        embedding_path := join(path, embedding),
        model.get_submodule(embedding_path),
        layers_path,
        lists[layers_path],
        norm_path := join(path, norm),
        model.get_submodule(norm_path),
    )


def vocabulary_embeddings(module: nn.Module, layers: nn.ModuleList) -> list[str]:
    """Names inside `module`, but not inside the layers, of vLLM's embeddings of a vocabulary; the
    largest vocabulary first, and of several the one that is made first."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    inside = set(layers.modules())
    sizes = {
        name: m.num_embeddings
        for name, m in module.named_modules()
        if isinstance(m, VocabParallelEmbedding)
        and not isinstance(m, ParallelLMHead)
        and m not in inside
    }
    return sorted(sizes, key=lambda name: -sizes[name])


def final_norm(text: nn.Module, layers: str) -> str | None:
    """Name of the norm that stands beside the layers in the text model. Of several (an embedding's
    too) it is the one made after the layers."""
    children = [name for name, _ in text.named_children()]
    norms = [n for n in children if is_norm(text.get_submodule(n))]
    if len(norms) > 1:
        norms = [n for n in norms if children.index(n) > children.index(layers.split(".")[0])]
    return norms[0] if len(norms) == 1 else None


def is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not list(module.children())


def outwards(name: str) -> Iterator[str]:
    """Names of the modules round one, innermost first; the outermost is ''."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def join(path: str, name: str) -> str:
    return f"{path}.{name}".strip(".")


def outline(model: nn.Module) -> str:
    """Names and classes of a model's modules, as deep as its lists, without what is in these."""
    shown: list[str] = []
    lists: list[str] = []
    for name, m in model.named_modules():
        if name and name.count(".") < 3 and not any(name.startswith(f"{x}.") for x in lists):
            length = f" x {len(m)}" if isinstance(m, nn.ModuleList) else ""
            shown.append(f"{name} ({type(m).__name__}{length})")
        if isinstance(m, nn.ModuleList):
            lists.append(name)
    return ", ".join(shown)
