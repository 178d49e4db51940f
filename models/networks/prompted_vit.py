"""A frozen Vision Transformer with prefix prompts (FedEvPrompt, eq. 1; Li and Liang 2021).

The backbone is any timm ``VisionTransformer`` with a class token. Prompts are further keys and
values in front of a layer's projected ones: b-prompts in the first layers and t-prompts in the
others, or one set g. Only prompts and head are trained and exchanged, unless ``train-backbone`` is
set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import timm
import torch
from timm.layers.attention import Attention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.maths.attention_rollout import rollout, without_prefix
from fedsilo.models.maths.dirichlet import Evidence
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.prefix_attention import fused_prefix_attention, prefix_attention
from fedsilo.models.networks.site_network import FrozenPart, TokenClassifier

# Uniform(-1, 1), as other prefixes start, would drown the keys of a trained ViT
_PROMPT_STD = 0.02


class _Backbone(nn.Module):
    """A ViT that is trained together with prompts and head."""

    def __init__(self, vit: VisionTransformer) -> None:
        super().__init__()
        self.vit = vit


class _FrozenBackbone(_Backbone, FrozenPart):
    """A ViT without gradients that always stays in eval mode."""

    def __init__(self, vit: VisionTransformer) -> None:
        super().__init__(vit.eval().requires_grad_(False))

    def train(self, mode: bool = True) -> _FrozenBackbone:
        """Keep eval mode and ignore ``mode``, because dropout would change the frozen tokens."""
        return super().train(False)


class PromptedViT(TokenClassifier):
    """A ViT with prompts, and a linear head that reads the class token.

    Attributes:
        fuses_maps: whether maps come from ``fused_prefix_attention``, which rounds differently.
            None, the default, means on a GPU only, so that results of a CPU keep their bits.
    """

    fuses_maps: bool | None = None

    def __init__(
        self,
        vit: VisionTransformer,
        shape: NetworkShape,
        settings: CommonSettings,
        evidence: Evidence | None = None,
    ) -> None:
        # Only one of these is built, because building a frozen part freezes the ViT
        backbone = _Backbone(vit) if settings.train_backbone else _FrozenBackbone(vit)
        head = nn.Sequential(nn.Dropout(settings.dropout), nn.Linear(vit.embed_dim, shape.outputs))
        super().__init__(backbone, head, tokens=1, channels=vit.embed_dim, evidence=evidence)
        self.scale: Tensor
        self.offset: Tensor
        self.prompts = nn.ParameterDict(_initial_prompts(vit, settings))
        scale, offset = pixel_scale(vit, shape.input_shape[0])
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("offset", offset, persistent=False)

    @property
    def vit(self) -> Any:
        """The backbone, a timm ``VisionTransformer``."""
        # Any, because torch types the attributes of a module as Tensor or Module
        return self.encoder.vit

    def slow_parameters(self) -> list[nn.Parameter]:
        """Return the prompts with the paper's learning rate mu_1: b-prompts, or the only set g."""
        return [self.prompts[name] for name in ("b", "g") if name in self.prompts]

    def grid_size(self) -> tuple[int, int]:
        """Return (rows, columns) of the grid of patches; a rollout map has the same grid."""
        return cast("tuple[int, int]", self.vit.patch_embed.grid_size)

    def image_size(self) -> tuple[int, int]:
        """Return height and width of the images in pixels."""
        return cast("tuple[int, int]", self.vit.patch_embed.img_size)

    def map_size(self) -> int:
        """Return the number of patches, which is the length of a rollout map."""
        return int(self.vit.patch_embed.num_patches)

    def encode(self, inputs: Tensor) -> Tensor:
        """Map images (batch, 1 or 3, height, width), -1..1, to the class token (batch, 1, c)."""
        return self._layers(self._patches(inputs), weights=False)[0][:, :1]

    def encode_with_map(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Map images to the class token (batch, 1, c) and patch tokens (batch, rows, columns, c).

        The tokens are the output of the last layer after the final norm. The patch tokens are laid
        out on the image's grid of patches (``grid_size``). Register tokens, which some ViTs have
        and which belong to no patch, are left out.
        """
        tokens, _ = self._layers(self._patches(inputs), weights=False)
        return tokens[:, :1], self._on_grid(tokens)

    def encode_with_rollout(
        self, inputs: Tensor, renormalise: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Map images to the class token (batch, 1, c) and to rollout maps (batch, patches).

        A rollout map sums to 1. Its shares tell how much the class token attends to each patch,
        through the product of all layers' attention and residual connections. Prompts have no
        share. With ``renormalise``, the rest of each attention row is scaled to sum to 1 before the
        product.
        """
        tokens, attentions = self._layers(
            self._patches(inputs), weights=True, renormalise=renormalise
        )
        return tokens[:, :1], rollout(attentions, self.vit.num_prefix_tokens)

    def encode_with_layers(self, inputs: Tensor) -> list[Tensor]:
        """Map images to the patch tokens before each layer and after the last one.

        Each entry of the list is (batch, rows, columns, c), on the grid of patches. No entry has
        the class token. Only the last entry has passed the final norm.
        """
        hidden: list[Tensor] = []
        last, _ = self._layers(self._patches(inputs), weights=False, hidden=hidden)
        return [self._on_grid(tokens) for tokens in [*hidden, last]]

    def encode_patches(self, patches: Tensor) -> Tensor:
        """Run the ViT on patches (batch, rows * columns, c) that another module has embedded.

        The patches have no position embeddings yet.

        Returns:
            The tokens of the patches after the final norm, (batch, rows, columns, c).
        """
        return self._on_grid(self._layers(patches, weights=False)[0])

    def _on_grid(self, tokens: Tensor) -> Tensor:
        """Lay out the patch tokens as (batch, rows, columns, c); drop class and register tokens."""
        patches = tokens[:, self.vit.num_prefix_tokens :]
        return patches.reshape(len(patches), *self.grid_size(), -1)

    def _patches(self, inputs: Tensor) -> Tensor:
        patches: Tensor = self.vit.patch_embed(inputs * self.scale + self.offset)
        return patches

    def _layers(
        self,
        patches: Tensor,
        weights: bool,
        hidden: list[Tensor] | None = None,
        renormalise: bool = True,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the ViT on embedded patches, with each layer's prompts, and apply the final norm.

        Args:
            patches: embedded patches (batch, n, c), without position embeddings.
            weights: whether to return each layer's attention weights.
            hidden: a list to which the tokens before each layer are appended. None to collect
                nothing.
            renormalise: whether the rows of the attention weights are scaled to sum to 1 again,
                after the columns of the prompts were dropped.

        Returns:
            All tokens (batch, tokens, c), where the class token and any register tokens come before
            the n patches. Then a list of each layer's attention weights between tokens, averaged
            over the heads (batch, tokens, tokens). The list is empty if ``weights`` is False.
        """
        vit = self.vit
        # This repeats timm's own forward pass, whose attention cannot take prompts
        x = vit.norm_pre(vit.patch_drop(vit._pos_embed(patches)))
        attentions = []
        for block, prompts in zip(vit.blocks, self._layer_prompts(), strict=True):
            if hidden is not None:
                hidden.append(x)
            mixed, mean = self._attend(block, x, prompts, weights)
            x = x + block.drop_path1(block.ls1(mixed))
            x = x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))
            if mean is not None:
                length = 0
                if prompts is not None:
                    length = prompts.shape[1]
                attentions.append(without_prefix(mean, length, renormalise))
        return vit.norm(x), attentions

    def _attend(
        self, block: Any, x: Tensor, prompts: Tensor | None, weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Apply a block's first norm and its attention with prompts to tokens.

        If ``fuses_maps`` is True, the mean attention is computed with little memory. If it is None,
        this holds on a GPU only.

        Args:
            block: the block of the ViT.
            x: tokens (batch, tokens, c), before the block's first norm.
            prompts: keys and values (2, prompts, c), or None.
            weights: whether to return the mean attention weights too.

        Returns:
            The attended tokens (batch, tokens, c), and the mean attention weights over the heads
            (batch, tokens, prompts + tokens). The latter are None if ``weights`` is False.
        """
        fuses = self.fuses_maps
        if fuses is None:
            fuses = x.device.type == "cuda"
        if weights and fuses:
            return fused_prefix_attention(block.attn, block.norm1(x), prompts)
        mixed, attention = prefix_attention(block.attn, block.norm1(x), prompts, weights)
        if attention is None:
            return mixed, None
        return mixed, attention.mean(dim=1)

    def _layer_prompts(self) -> list[Tensor | None]:
        """List each layer's prompts, (2, length, channels), or None for a layer without prompts.

        The setting 'vit.prompt-sets' decides which layers share a set. With 'none', no layer has
        prompts.
        """
        layers: list[Tensor | None] = []
        for name in ("b", "t", "g"):  # b-prompts are in the first layers, t-prompts in the last
            if name in self.prompts:
                layers += self.prompts[name]
        if not layers:
            layers = [None] * len(self.vit.blocks)
        return layers


def pixel_scale(vit: VisionTransformer, channels: int) -> tuple[Tensor, Tensor]:
    """Return the scale and offset that map pixels in -1..1 to the range that a ViT expects.

    An input x becomes scale * x + offset. The scale and the offset are (channels, 1, 1). If
    ``channels`` is not the ViT's three colours, the means and deviations of the three colours are
    averaged.
    """

    def by_channel(statistics: Sequence[float]) -> Tensor:
        values = torch.tensor(statistics)
        if channels != len(values):
            values = values.mean()[None]
        return values[:, None, None]

    given = cast("dict[str, Any]", vit.pretrained_cfg)
    # timm standardises p in 0..1 by (p - mean) / std; here x = 2 p - 1 comes in, so p = (x + 1) / 2
    mean, std = by_channel(given["mean"]), by_channel(given["std"])
    return 0.5 / std, (0.5 - mean) / std


def _initial_prompts(vit: VisionTransformer, settings: CommonSettings) -> dict[str, nn.Parameter]:
    """Draw the initial prompts of each set: name of the set -> (layers, 2, length, channels).

    Prompts are trained keys and values of a layer. On the axis of length 2, keys come first. The
    setting 'vit.prompt-sets' decides which sets there are:

    - 'b-t': set ``b`` for the first 'vit.basic-layers' layers, and set ``t`` for the other layers.
    - 'g': one set ``g`` for all layers.
    - 'none': the result is empty.

    The numbers are drawn from a normal distribution of a small deviation.

    Raises:
        SettingError: with 'b-t', no layer is left for set ``t``.
    """
    depth, basic = len(vit.blocks), settings.basic_layers
    if settings.prompt_sets == "b-t" and basic >= depth:
        raise SettingError(
            f"setting 'vit.basic-layers' must be below the backbone's {depth} layers, but is "
            f"{basic}: t-prompts would have no layer; lower it, or set 'vit.prompt-sets' to 'g'"
        )
    layers = {"b-t": {"b": basic, "t": depth - basic}, "g": {"g": depth}, "none": {}}
    shape = (2, settings.prompt_length, vit.embed_dim)
    prompts = {}
    for name, count in layers[settings.prompt_sets].items():
        prompts[name] = nn.Parameter(_PROMPT_STD * torch.randn(count, *shape))
    return prompts


def build_vit(settings: CommonSettings, shape: NetworkShape, **more: Any) -> VisionTransformer:
    """Build the ViT that the settings name, without a head and with random weights.

    Args:
        settings: the backbone's name, width, depth, heads and patch size. For a value of 0, the
            backbone keeps its usual value.
        shape: the shape of the images.
        more: further arguments of ``timm.create_model``.

    Raises:
        SettingError: in one of these cases:

            - timm cannot build the ViT.
            - The ViT has blocks of an unusual class, or no class token.
            - The images have neither 1 nor 3 channels.
            - The patch size does not divide the images' sides.
    """
    channels, *size = shape.input_shape
    sizes = {
        "embed_dim": settings.backbone_width,
        "depth": settings.backbone_depth,
        "num_heads": settings.backbone_heads,
        "patch_size": settings.backbone_patch,
    }
    changes: dict[str, Any] = {}
    for key, value in sizes.items():
        if value:  # 0 keeps the backbone's own size
            changes[key] = value
    # The published means and deviations are for three colours; only grey has a rule to merge them
    if channels not in (1, 3):
        raise SettingError(
            f"network 'vit' takes grey or colour images, but data set '{settings.dataset}' has "
            f"{channels} channels: choose another 'network.name'"
        )
    named = f"setting 'vit.backbone' is '{settings.backbone}'"
    changes |= {"num_classes": 0, "img_size": tuple(size), "in_chans": channels}
    try:
        vit: Any = timm.create_model(settings.backbone, **changes, **more)
    except Exception as error:  # timm refuses in many ways: RuntimeError, TypeError, AssertionError
        raise SettingError(
            f"{named}, which timm cannot build for images of {size[0]}x{size[1]} "
            f"({' '.join(str(error).split())}): name a VisionTransformer of timm "
            "('timm.list_models(\"vit_*\")')"
        ) from None
    if not _has_plain_blocks(vit) or vit.cls_token is None:
        raise SettingError(
            f"{named}, which is not a timm VisionTransformer with plain blocks and a class token: "
            "name one, for example vit_small_patch16_224"
        )
    patch = vit.patch_embed.patch_size
    if size[0] % patch[0] or size[1] % patch[1]:
        raise SettingError(
            f"{named}, whose patches of {patch[0]} pixels do not divide images of {size[0]}: set "
            "'vit.backbone-patch' to a divisor, or 'data.image-size' to a multiple"
        )
    return cast(VisionTransformer, vit)


def _has_plain_blocks(vit: nn.Module) -> bool:
    """Tell whether a network is timm's usual ViT, with blocks of the usual classes."""
    if not isinstance(vit, VisionTransformer):
        return False
    for block in vit.blocks:
        if not isinstance(block, Block) or not isinstance(block.attn, Attention):
            return False
    return True


def build_prompted_vit(
    settings: CommonSettings, shape: NetworkShape, evidence: Evidence | None
) -> PromptedViT:
    """Build the ViT with prompts, but without loading pretrained weights for its backbone.

    Prompts are trained keys and values of a layer. With two sets of prompts, the first
    'vit.basic-layers' layers have set ``b`` and all other layers have set ``t``. If
    'vit.backbone-weights' is 'random', the backbone gets random weights here. Otherwise its arrays
    have shapes but no values, and ``load_backbone`` fills the backbone later.

    Args:
        settings: the run's settings.
        shape: the shape of the images and the number of classes.
        evidence: turns logits into evidence for an evidential loss. None for cross-entropy.

    Raises:
        SettingError: the ViT cannot be built, does not fit the images, or has no layer left for set
            ``t``.
    """
    if settings.backbone_weights == "random":
        return PromptedViT(build_vit(settings, shape), shape, settings, evidence)
    # A server that exchanges only prompts never needs the weights. On the meta device the backbone
    # has shapes, but takes no memory
    with torch.device("meta"):
        vit = build_vit(settings, shape)
    return PromptedViT(vit, shape, settings, evidence)
