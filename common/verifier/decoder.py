"""Which modules of the model that vLLM has loaded are the verifier's decoder layers."""

from torch import nn

from common.errors import UserError


def find_decoder(model: nn.Module, num_layers: int) -> tuple[nn.Module, nn.ModuleList]:
    """Return (embedding, decoder layers) of the text model inside vLLM's model.

    The layers are the ModuleList called `layers` with as many entries as config.json says;
    wrappers (multimodal, language-model-only) only add to the path before it.
    """
    layers = [
        (name, m)
        for name, m in model.named_modules()
        if isinstance(m, nn.ModuleList) and name.split(".")[-1] == "layers" and len(m) == num_layers
    ]
    if len(layers) == 1:
        name, found = layers[0]
        parent = model.get_submodule(name.rpartition(".")[0])
        for embedding in ("embed_tokens", "embedding"):
            if isinstance(getattr(parent, embedding, None), nn.Module):
                return getattr(parent, embedding), found
    names = [
        n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) or n.count(".") < 2
    ]
    raise UserError(
        f"cannot find the {num_layers} decoder layers and their embedding in"
        f" {type(model).__name__}; its modules are {', '.join(filter(None, names))}"
    )
