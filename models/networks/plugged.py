"""Networks from outside: a plugin's ``nn.Module``, or any classifier of timm.

A builder is called as ``build(input_shape, classes)`` and returns a module that maps inputs
(batch, *input_shape) to logits (batch, classes). If the module has timm's ``forward_features`` and
``forward_head``, its features become tokens; otherwise its logits are its only token.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from fedsilo.core.errors import SettingError
from fedsilo.core.one_line import reason_of
from fedsilo.core.plugins import resolve_plugin, wrong_plugin
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.maths.dirichlet import Evidence
from fedsilo.models.networks.kinds import OWN_NETWORKS, TIMM, NetworkShape
from fedsilo.models.networks.site_network import TokenClassifier
from fedsilo.models.privacy.dp_sgd import with_group_norm

_DROPOUT = nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d
# Samples that a new network is tried with; two show whether the batch keeps its place
_BATCH = 2
R = TypeVar("R")


def build_plugged(
    settings: CommonSettings, shape: NetworkShape, evidence: Evidence | None
) -> TokenClassifier:
    """Build the network of a plugin or of timm, and try whether it takes such inputs.

    The prefix of 'network.name' tells timm's networks from those of plugins. If a plugin returns a
    ``TokenClassifier``, it is used as it is, without a trial. If training is private, group norm
    replaces batch norm in any network.

    Args:
        settings: the run's settings.
        shape: the shape of an input and the number of classes.
        evidence: turns logits into evidence for an evidential loss. None for cross-entropy. A
            plugin's ``TokenClassifier`` ignores it.

    Raises:
        SettingError: in one of these cases:

            - The network cannot be built or does not take such inputs.
            - It does not return one logit per class.
            - Training is private, and the network mixes the samples of a batch.
    """
    name = settings.network
    # The server builds networks on the meta device to read shapes; foreign code may not run there
    with torch.device("cpu"):
        if name.startswith(TIMM):
            module = _timm_module(name.removeprefix(TIMM), shape)
        else:
            module = call_builder(name, resolve_plugin("network", name, OWN_NETWORKS), shape)
        if settings.is_private():
            _refuse_batch_norms(name, module)
        if isinstance(module, TokenClassifier):
            network: TokenClassifier = module
        else:
            network = PluggedClassifier(name, module, shape, evidence)
        if settings.is_private():
            with_group_norm(network)
            _refuse_batch_dependence(name, network, shape)
        return network


def call_builder(name: str, builder: Any, shape: NetworkShape) -> nn.Module:
    """Call the function by which a plugin builds its network, and return the network.

    The function gets the input shape and the number of classes.

    Args:
        name: the network's name, for errors.
        builder: the object that the plugin names, which should be this function.
        shape: the shape of an input and the number of classes.

    Raises:
        SettingError: ``builder`` is not a function, fails, or returns no module with trainable
            parameters of known sizes.
    """
    if not callable(builder) or isinstance(builder, nn.Module):
        raise wrong_plugin("network", name, builder, "function build(input_shape, classes)")
    try:
        module = builder(shape.input_shape, shape.outputs)
    except Exception as error:  # foreign code may raise anything
        raise SettingError(f"network '{name}' cannot be built ({reason_of(error)})") from None
    fault = _find_module_fault(module)
    if fault:
        raise SettingError(f"network '{name}' {fault}")
    return cast(nn.Module, module)


def _find_module_fault(module: Any) -> str | None:
    """Return the reason why a builder's result cannot be trained, or None if it can be.

    The text is a predicate, which the caller puts after the network's name. The result must be a
    module with at least one trainable parameter. Each parameter and buffer must have a known size.
    """
    if not isinstance(module, nn.Module):
        return f"must be an nn.Module, but is a '{type(module).__name__}'"
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return "has no parameters to train"
    if any(map(nn.parameter.is_lazy, [*module.parameters(), *module.buffers()])):
        return "has lazy layers: give them their sizes"
    return None


def _timm_module(name: str, shape: NetworkShape) -> nn.Module:
    """Build a timm classifier for the images and classes of ``shape``, with random weights.

    timm gets the size of the images, which a ViT needs. A network that does not take this size is
    built without it.

    Args:
        name: timm's name for the network.
        shape: the shape of an image and the number of classes.

    Raises:
        SettingError: the data are a table, or timm cannot build the network.
    """
    import timm

    if len(shape.input_shape) != 3:
        raise SettingError(f"network '{TIMM}{name}' takes images, but the data are a table")
    channels, *size = shape.input_shape
    usual: dict[str, Any] = {"num_classes": shape.outputs, "in_chans": channels}
    # A ViT needs the size of its images at construction, a convolutional network refuses the
    # argument
    try:
        try:
            made = timm.create_model(name, img_size=tuple(size), **usual)
        except TypeError:  # a network for images of any size
            made = timm.create_model(name, **usual)
    except Exception as error:  # timm refuses in many ways
        raise SettingError(
            f"timm cannot build network '{TIMM}{name}' for images of {size[0]}x{size[1]} "
            f"({reason_of(error)})"
        ) from None
    return made


def _refuse_batch_norms(name: str, module: nn.Module) -> None:
    """Refuse a network with a batch norm that group norm cannot replace.

    Batch norm mixes the samples of a batch, which private training must not do. Group norm replaces
    only layers whose class is exactly ``BatchNorm1d`` or ``BatchNorm2d``.

    Raises:
        SettingError: the network has a batch norm of another class, such as ``BatchNorm3d`` or
            ``SyncBatchNorm``. The error names the first such class.
    """
    usual = (nn.BatchNorm1d, nn.BatchNorm2d)
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and type(part) not in usual:
            raise SettingError(
                f"network '{name}' has a {type(part).__name__}, which mixes the patients of a "
                "batch, but 'privacy.sample-clip-norm' is set: build it with group norm"
            )


def _refuse_batch_dependence(name: str, network: nn.Module, shape: NetworkShape) -> None:
    """Refuse a network whose logits for a sample depend on the other samples of the batch.

    Private training clips the contribution of each patient. If samples influenced each other,
    clipping would not bound the influence of one patient. The network gets different inputs in eval
    mode, together and one by one. Relative differences of 0.1 % count as rounding. The network is
    in training mode afterwards.

    Raises:
        SettingError: the logits depend on the batch.
    """
    inputs = torch.linspace(-1, 1, _BATCH * prod(shape.input_shape)).view(
        _BATCH, *shape.input_shape
    )
    # Different inputs, because a mean over equal ones would change nothing
    network.eval()
    with torch.no_grad():
        together = network(inputs)
        alone = torch.cat([network(sample[None]) for sample in inputs])
    network.train()
    # Kernels for other batch sizes round differently; a mixed batch differs by far more than this
    if not torch.allclose(together, alone, rtol=1e-3, atol=1e-4, equal_nan=True):
        raise SettingError(
            f"network '{name}' gives a sample other logits when its batch changes, but "
            "'privacy.sample-clip-norm' is set: build it so that samples do not influence each "
            "other"
        )


class PluggedClassifier(TokenClassifier):
    """Wraps a foreign network as a ``TokenClassifier``.

    Its dropout is active only in training, not in Monte Carlo dropout. A network of timm gets
    pixels in the range of its published weights.
    """

    scale: Tensor
    offset: Tensor

    def __init__(
        self, name: str, module: nn.Module, shape: NetworkShape, evidence: Evidence | None
    ) -> None:
        encode = getattr(module, "forward_features", None)
        classify = getattr(module, "forward_head", None)
        self._split = callable(encode) and callable(classify)
        features = _try_module(name, module, shape, self._split)
        # The places of a map (channels, rows, columns) become tokens. Some networks, such as Swin,
        # put the channels last; ``num_features`` tells the two orders apart
        self._last = features.ndim < 3 or features.shape[-1] == getattr(module, "num_features", 0)
        channels = features.shape[0]
        if self._last:
            channels = features.shape[-1]
        self._shape = tuple(features.shape)
        tokens = prod(self._shape) // channels
        super().__init__(module, nn.Identity(), tokens=tokens, channels=channels, evidence=evidence)
        for part in module.modules():
            if isinstance(part, _DROPOUT):
                part.only_trains = True  # type: ignore[assignment]  # see only_dropout_active
        for which, values in zip(("scale", "offset"), _pixels(name, module, shape), strict=True):
            self.register_buffer(which, values, persistent=False)

    def encode(self, inputs: Tensor) -> Tensor:
        """Map inputs (batch, *input_shape) to tokens (batch, l, c)."""
        return self.encode_with_map(inputs)[0]

    def encode_with_map(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Map inputs to the tokens, and to the same features as a map on the image's grid.

        The inputs are (batch, *input_shape), the tokens (batch, tokens, channels), and the map is
        (batch, rows, columns, channels). If the features have no grid, the map has one row with all
        tokens.
        """
        inputs = inputs * self.scale + self.offset
        if self._split:
            features = cast(Any, self.encoder).forward_features(inputs)
        else:
            features = self.encoder(inputs)
        if not self._last:
            features = features.movedim(1, -1)
        tokens = features.reshape(features.shape[0], self.tokens, self.channels)
        if features.ndim != 4:
            return tokens, tokens[:, None]
        return tokens, features

    def classify(self, features: Tensor) -> Tensor:
        """Compute logits (batch, classes) from tokens (batch, tokens, channels).

        A network with ``forward_features`` and ``forward_head`` gets the tokens in the shape of its
        features. Its ``forward_head`` maps them to logits. For any other network the tokens are
        already the logits. If the loss is evidential, the logits are the logarithms of the
        parameters of a Dirichlet distribution.
        """
        logits: Tensor = features.flatten(1)
        if self._split:
            # Back to the shape that the network gave: (channels, rows, columns), or channels last
            if self._last:
                maps = features.reshape(features.shape[0], *self._shape)
            else:
                channels, *places = self._shape
                maps = features.reshape(features.shape[0], *places, channels).movedim(-1, 1)
            logits = cast(Any, self.encoder).forward_head(maps)
        if self.evidence:
            logits = self.evidence(logits)
        return logits

    def fill(self, state: Mapping[str, Any], where: str) -> None:
        """Load published weights into the wrapped module. If one array does not fit, load none.

        If the published classifier is missing or has another shape, the module keeps its own
        classifier. For a timm network, weights of the first convolution are adapted to the number
        of input channels.

        Args:
            state: arrays by the module's own names.
            where: the origin of the weights, for errors.

        Raises:
            SettingError: another array is missing or has another shape, an array's name is unknown,
                or an array is not finite.
        """
        given: dict[str, Tensor] = {}
        for name, array in state.items():
            given[name] = torch.as_tensor(array).clone()
        wanted, published = self.encoder.state_dict(), getattr(self.encoder, "pretrained_cfg", {})
        # Published weights are for three channels; timm sums or repeats them for other numbers
        for layer in _names(published.get("first_conv")):
            name = f"{layer}.weight"
            if name in given and name in wanted and given[name].shape != wanted[name].shape:
                from timm.models import adapt_input_conv

                given[name] = adapt_input_conv(wanted[name].shape[1], given[name])
        heads = _names(published.get("classifier"))
        # A published head for other classes is left out: the network keeps its untrained one
        for name, array in wanted.items():
            fits = name in given and given[name].shape == array.shape
            if name.rpartition(".")[0] in heads and not fits:
                given[name] = array
        fault = _find_misfit(given, wanted)
        if fault:
            raise SettingError(f"setting 'train.initial-weights': {where} does not fit: {fault}")
        self.encoder.load_state_dict(given)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return timm's layer names as a tuple; ``given`` is one name, a tuple of names or None."""
    if isinstance(given, str):
        return (given,)
    return given or ()


def _find_misfit(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str | None:
    """Return the reason why arrays cannot replace a network's arrays, or None if they can.

    ``given`` must have exactly the names and shapes of ``wanted``, and its arrays must be finite.
    """
    for name in sorted(given.keys() | wanted.keys()):
        is_known = name in given and name in wanted
        if not is_known or given[name].shape != wanted[name].shape:
            return f"'{name}' is missing, surplus or of another shape"
    for array in given.values():
        if not array.isfinite().all():
            return "it contains non-finite values"
    return None


def _try_module(name: str, module: nn.Module, shape: NetworkShape, split: bool) -> Tensor:
    """Check a network with a batch of two zero inputs, and return the features of one sample.

    The features have no batch axis. The network runs in eval mode, so its running statistics do not
    change.

    Args:
        name: the network's name, for errors.
        module: the network, which is in training mode afterwards.
        shape: the shape of an input and the number of classes.
        split: whether the network has timm's ``forward_features``, which gives the features, and
            ``forward_head``, which gives the logits. If False, the features are the logits.

    Raises:
        SettingError: in one of these cases:

            - The network raises an error for such inputs.
            - The logits are not (2, classes).
            - The features are not (2, ...).
    """

    def forward(inputs: Tensor) -> tuple[Any, Any]:
        logits = features = module(inputs)
        if split:
            features = cast(Any, module).forward_features(inputs)
            logits = cast(Any, module).forward_head(features)
        return logits, features

    logits, features = run_on_zeros(name, module, shape, forward)
    # A tuple or mapping, as detection networks return it, has no shape
    wanted, given = (_BATCH, shape.outputs), tuple(getattr(logits, "shape", ()))
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or given != wanted:
        returned = type(logits).__name__
        if isinstance(logits, Tensor):
            returned = f"{logits.dtype} of {given}"
        raise SettingError(
            f"network '{name}' must return logits of {wanted} for {_BATCH} inputs and "
            f"{shape.outputs} classes, but returns {returned}"
        )
    if not isinstance(features, Tensor) or features.ndim < 2 or len(features) != _BATCH:
        raise SettingError(
            f"network '{name}': 'forward_features' must return a tensor (batch, ...)"
        )
    return features[0]


def run_on_zeros(
    name: str, module: nn.Module, shape: NetworkShape, forward: Callable[[Tensor], R]
) -> R:
    """Run ``forward`` on a batch of two zero inputs with a network in eval mode.

    Running statistics do not change, and ``module`` is in training mode afterwards.

    Args:
        name: the network's name, for errors.
        module: the network that ``forward`` calls.
        shape: the shape of an input.
        forward: maps inputs (2, *input_shape) to any result.

    Returns:
        The result of ``forward``.

    Raises:
        SettingError: ``forward`` raises an error.
    """
    # Eval mode, because batch norm in training mode would take zeros into its running statistics
    inputs = torch.zeros(_BATCH, *shape.input_shape)
    module.eval()
    try:
        with torch.no_grad():
            return forward(inputs)
    except Exception as error:  # foreign code may raise anything
        raise SettingError(
            f"network '{name}' does not take inputs of {shape.input_shape} ({reason_of(error)})"
        ) from None
    finally:
        module.train()


def _pixels(name: str, module: nn.Module, shape: NetworkShape) -> tuple[Tensor, Tensor]:
    """Return the scale and the offset that adapt the pixels of the inputs to a network.

    An input x becomes x * scale + offset. For networks of timm the two are (channels, 1, 1), and
    map -1..1 to the pixels of timm's training. For a plugin they are the scalars 1 and 0.
    """
    if not name.startswith(TIMM):
        return torch.ones(()), torch.zeros(())
    from fedsilo.models.networks.prompted_vit import pixel_scale

    return pixel_scale(cast(Any, module), shape.input_shape[0])
