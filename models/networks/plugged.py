"""A network of somebody else's: a plug's ``nn.Module``, or any classifier of timm.

A builder is called as ``build(input_shape, classes)`` and returns a module that maps inputs
(batch, *input_shape) to logits (batch, classes). Where it has timm's ``forward_features`` and
``forward_head`` methods read its features as tokens; else its logits are its only token.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.one_line import reason_of
from fedsilo.models.contract.plugs import plug, wrong
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.maths.dirichlet import Evidence
from fedsilo.models.networks.kinds import OWN_NETWORKS, TIMM, Task
from fedsilo.models.networks.site_network import TokenClassifier
from fedsilo.models.privacy.group_norm import with_group_norm

_DROPOUT = nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d
_BATCH = 2  # of the inputs that a network is tried with


def build_plugged(
    settings: CommonSettings, task: Task, evidence: Evidence | None
) -> TokenClassifier:
    """Build the network that ``settings.network`` names, tried with inputs of zeros.

    Raises:
        SettingError: it cannot be built or takes no such inputs, or gives no logits of the classes.
    """
    name = settings.network
    # The meta device, on which the server builds a network for its shapes, is not for any code
    with torch.device("cpu"):
        if name.startswith(TIMM):
            module = _timm_module(name.removeprefix(TIMM), task)
        else:
            module = _call_builder(name, plug("network", name, OWN_NETWORKS), task)
        if settings.is_private():
            _refuse_batch_norms(name, module)
        if isinstance(module, TokenClassifier):
            network: TokenClassifier = module
        else:
            network = PluggedClassifier(name, module, task, evidence)
        if settings.is_private():
            with_group_norm(network)
            _refuse_meeting(name, network, task)
        return network


def _call_builder(name: str, builder: Any, task: Task) -> nn.Module:
    """Return the module that a plug's builder makes."""
    if not callable(builder) or isinstance(builder, nn.Module):
        raise wrong("network", name, builder, "function build(input_shape, classes)")
    try:
        module = builder(task.input_shape, task.classes)
    except Exception as error:  # it is anybody's code
        raise SettingError(f"network '{name}' cannot be built ({reason_of(error)})") from None
    if not isinstance(module, nn.Module):
        raise SettingError(
            f"network '{name}' gives a '{type(module).__name__}'; it must be an nn.Module"
        )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise SettingError(f"network '{name}' has no parameters to train")
    if any(map(nn.parameter.is_lazy, [*module.parameters(), *module.buffers()])):
        raise SettingError(f"network '{name}' has lazy layers; give them their sizes")
    return module


def _timm_module(name: str, task: Task) -> nn.Module:
    import timm

    if len(task.input_shape) != 3:
        raise SettingError(f"network '{TIMM}{name}' takes images, and the data are a table")
    channels, *size = task.input_shape
    usual: dict[str, Any] = {"num_classes": task.classes, "in_chans": channels}
    try:
        try:
            made = timm.create_model(name, img_size=tuple(size), **usual)
        except TypeError:  # a network for images of any size
            made = timm.create_model(name, **usual)
    except Exception as error:  # timm refuses in many ways
        raise SettingError(
            f"network '{TIMM}{name}' is none that timm can build for images of "
            f"{size[0]}x{size[1]} ({reason_of(error)})"
        ) from None
    return made


def _refuse_batch_norms(name: str, module: nn.Module) -> None:
    """Refuse batch norms that group norm cannot replace: in them patients meet."""
    usual = (nn.BatchNorm1d, nn.BatchNorm2d)
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and type(part) not in usual:
            raise SettingError(
                f"network '{name}' has a {type(part).__name__}, in which patients meet, and "
                "'sample-clip-norm' is set: build it with group norm"
            )


def _refuse_meeting(name: str, network: nn.Module, task: Task) -> None:
    """Refuse a network in which samples meet otherwise, such as by the mean of their batch.

    Training takes each sample alone; in means and measurements no clipping would bound a patient.
    """
    inputs = torch.linspace(-1, 1, _BATCH * prod(task.input_shape)).view(_BATCH, *task.input_shape)
    network.eval()
    with torch.no_grad():
        together, alone = network(inputs), torch.cat([network(one[None]) for one in inputs])
    network.train()
    if not torch.allclose(together, alone, rtol=1e-3, atol=1e-4, equal_nan=True):
        raise SettingError(
            f"network '{name}' gives a sample other logits when its batch changes, so patients "
            "meet in it, and 'sample-clip-norm' is set: build it so that each sample is by itself"
        )


class PluggedClassifier(TokenClassifier):
    """Somebody's network between our inputs and logits; its dropout is for training alone.

    timm's networks see pixels as their pretrained weights do.
    """

    scale: Tensor
    offset: Tensor

    def __init__(self, name: str, module: nn.Module, task: Task, evidence: Evidence | None) -> None:
        parts = [getattr(module, f"forward_{part}", None) for part in ("features", "head")]
        self._split = all(map(callable, parts))
        features = _try_module(name, module, task, self._split)
        # Of a map (channels, rows, columns) the places are tokens; Swin's channels come last
        self._last = features.ndim < 3 or features.shape[-1] == getattr(module, "num_features", 0)
        channels = features.shape[-1 if self._last else 0]
        self._shape = tuple(features.shape)
        super().__init__(
            module, nn.Identity(), tokens=prod(self._shape) // channels, channels=channels,
            evidence=evidence,
        )  # fmt: skip
        for part in module.modules():
            if isinstance(part, _DROPOUT):
                part.only_trains = True  # type: ignore[assignment]  # see only_dropout_active
        for which, values in zip(("scale", "offset"), _pixels(name, module, task), strict=True):
            self.register_buffer(which, values, persistent=False)

    def encode(self, inputs: Tensor) -> Tensor:
        """Map inputs (batch, *input_shape) to tokens (batch, l, c)."""
        return self.encode_with_map(inputs)[0]

    def encode_with_map(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens and the last map (batch, rows, columns, c); of no map, a row of tokens."""
        inputs = inputs * self.scale + self.offset
        encode = self.encoder.forward_features if self._split else self.encoder
        features = cast(Callable[[Tensor], Tensor], encode)(inputs)
        if not self._last:
            features = features.movedim(1, -1)
        tokens = features.reshape(features.shape[0], self.tokens, self.channels)
        return tokens, features if features.ndim == 4 else tokens[:, None]

    def classify(self, features: Tensor) -> Tensor:
        """Map tokens (batch, l, c) to logits (batch, classes)."""
        logits = features.flatten(1)
        if self._split:
            channels, *places = self._shape
            shape = self._shape if self._last else (*places, channels)
            maps = features.reshape(features.shape[0], *shape)
            head = cast(Callable[[Tensor], Tensor], self.encoder.forward_head)
            logits = head(maps if self._last else maps.movedim(-1, 1))
        return self.evidence(logits) if self.evidence else logits

    def fill(self, state: Mapping[str, Any], where: str) -> None:
        """Put weights by the module's own names into it; of other classes than its own no head's.

        A first convolution of colours takes grey or other channels, as timm adapts it.

        Raises:
            SettingError: arrays are missing, too many, of another shape or not finite.
        """
        given = {name: torch.as_tensor(array).clone() for name, array in state.items()}
        wanted, published = self.encoder.state_dict(), getattr(self.encoder, "pretrained_cfg", {})
        first, heads = (_names(published.get(key)) for key in ("first_conv", "classifier"))
        for name in (f"{layer}.weight" for layer in first):
            if name in given and name in wanted and given[name].shape != wanted[name].shape:
                from timm.models import adapt_input_conv

                given[name] = adapt_input_conv(wanted[name].shape[1], given[name])
        given |= {
            name: array
            for name, array in wanted.items()
            if name.rpartition(".")[0] in heads
            and getattr(given.get(name), "shape", None) != array.shape
        }
        ours, theirs = ({n: a.shape for n, a in part.items()} for part in (wanted, given))
        faults = sorted(name for name, _ in ours.items() ^ theirs.items())
        if faults or not all(array.isfinite().all() for array in given.values()):
            what = f"'{faults[0]}' is missing, too much or of another shape" if faults else (
                "it has values that are not finite"
            )  # fmt: skip
            raise SettingError(f"setting 'initial-weights': {where} does not fit: {what}")
        self.encoder.load_state_dict(given)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else given or ()


def _try_module(name: str, module: nn.Module, task: Task, split: bool) -> Tensor:
    """Return one sample's features, (...), of ``module`` in eval mode.

    Raises:
        SettingError: it takes no such inputs, or gives no logits of the classes.
    """
    inputs = torch.zeros(_BATCH, *task.input_shape)
    module.eval()
    try:
        with torch.no_grad():
            logits = features = module(inputs)
            if split:
                features = cast(Any, module).forward_features(inputs)
                logits = cast(Any, module).forward_head(features)
    except Exception as error:  # it is anybody's code
        raise SettingError(
            f"network '{name}' does not take inputs of {task.input_shape} ({reason_of(error)})"
        ) from None
    finally:
        module.train()
    wanted, shape = (_BATCH, task.classes), tuple(getattr(logits, "shape", ()))
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or shape != wanted:
        is_ = f"{logits.dtype} of {shape}" if isinstance(logits, Tensor) else type(logits).__name__
        raise SettingError(
            f"network '{name}' gives {is_}; of {_BATCH} inputs and {task.classes} classes it must "
            f"give logits of {wanted}"
        )
    if not isinstance(features, Tensor) or features.ndim < 2 or len(features) != _BATCH:
        raise SettingError(f"network '{name}': 'forward_features' gives no tensor of the batch")
    return features[0]


def _pixels(name: str, module: nn.Module, task: Task) -> tuple[Tensor, Tensor]:
    """Return scale and offset of inputs."""
    if not name.startswith(TIMM):
        return torch.ones(()), torch.zeros(())
    from fedsilo.models.networks.prompted_vit import pixel_scale

    return pixel_scale(cast(Any, module), task.input_shape[0])
