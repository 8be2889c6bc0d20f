"""Fill a rank's stages from a model on disk, to compute with it; there is no optimizer.

Each rank reads its own slices, at any layout, whatever wrote the model. Where masters are on disk
and not codes, γ takes a pass over the whole weight (``checkpoint.latent``).
"""

import torch

from megabit.checkpoint.source import Index, LogicalTensor, ModelSource, logical_tensors
from megabit.errors import UserError
from megabit.model.decoder import CausalLMStages
from megabit.model.huggingface_linear import HuggingFaceLayer, check_huggingface, read_product
from megabit.tensor_parallel import Shard, TernaryLayer, sharded_parameters
from megabit_kernels import TernaryWeight


@torch.no_grad()
def load_stages(stages: CausalLMStages, source: ModelSource) -> None:
    """Give ``stages`` the weights of ``source``: codes and scales, dense matrices in the dtype that
    is computed in, gains as they are. So the forward pass has the bits of the run that saved them.

    Sends nothing. The ternary layers hold no latent weights afterwards.

    Raises:
        UserError: ``source`` is another model, or cannot be read.
    """
    context = stages.context
    if context.huggingface is not None:
        check_huggingface(source, context.huggingface)
    layers = {
        f"{name}.weight": module
        for name, module in stages.named_modules()
        if isinstance(module, TernaryLayer)
    }
    tensors = logical_tensors(source.model)
    parameters = sharded_parameters(stages)
    for name, parameter in parameters.items():
        _check(
            source, name, tensors.get(name), LogicalTensor(parameter.shard.shape, name in layers)
        )
    for name, parameter in parameters.items():
        index = _index(parameter.shard)
        layer = layers.get(name)
        if isinstance(layer, HuggingFaceLayer):
            layer.give_up_latent()
            layer.product = read_product(source, name, index, context)
        elif layer is not None:
            columns = parameter.shard.local_shape[1]
            packed = source.codes(name, index).to(context.device)
            scale = source.scale(name).to(context.device, context.master_dtype)
            layer.give_up_latent()
            layer.receive(TernaryWeight.from_packed(packed, columns, scale))
        else:
            dtype = context.compute_dtype if parameter.dim() > 1 else context.master_dtype
            parameter.data = source.values(name, index).to(context.device, dtype)
    if stages.head_use is not None:  # held the embedding's memory
        assert stages.embedding_weight is not None
        stages.head_use.data = stages.embedding_weight.data


def _check(
    source: ModelSource, name: str, found: LogicalTensor | None, wanted: LogicalTensor
) -> None:
    if found != wanted:
        raise UserError(
            f"{source.path}: {name} is {_describe(found)}, the model to be filled has "
            f"{_describe(wanted)}"
        )


def _describe(tensor: LogicalTensor | None) -> str:
    if tensor is None:
        return "missing"
    return f"{'ternary' if tensor.is_ternary else 'dense'} {list(tensor.shape)}"


def _index(shard: Shard) -> Index:
    """Where in the logical tensor a rank's part is."""
    index = [slice(0, size) for size in shard.shape]
    index[shard.dim] = slice(shard.span.start, shard.span.stop)
    return tuple(index)
