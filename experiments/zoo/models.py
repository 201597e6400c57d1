"""Models of transformers, torchvision and timm, from their configurations: nothing is downloaded.

Each has two sizes: the published one (of large models with fewer layers), which is planned without
its memory, and a small one, which is run. A model file of a job names the small ones:
"experiments.zoo.models:gpt2".
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from typing_extensions import override

from distbelief.graph.capture import InputSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One size of a model."""

    make: Callable[[], nn.Module]
    inputs: Sequence[InputSpec]
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One row of the table."""

    title: str
    library: str
    kind: str  # "transformer", "convolutional" or "other"
    published: Size
    small: Size


class Scores(nn.Module):
    """A model's scores with the classes first, as torch's losses want them: (batch, classes, n)."""

    def __init__(self, inner: nn.Module, names: Sequence[str], result: str) -> None:
        super().__init__()
        self.inner = inner
        self.names = names
        self.result = result

    @override
    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.inner(**dict(zip(self.names, inputs, strict=True)))
        scores: torch.Tensor = getattr(outputs, self.result)
        return scores.transpose(1, -1)


class Sequences(Scores):
    """An encoder and decoder that read the same words."""

    @override
    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs[0], *inputs)


def _import(library: str) -> Any:  # noqa: ANN401 -- of an extra
    # PyPI's torchvision is compiled for torch with CUDA: beside another torch its own operators
    # are missing, and it fails where it decorates these two, which no model here uses.
    if torch.version.cuda is None and not hasattr(torch.ops.torchvision, "nms"):
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")
    return importlib.import_module(library)


# --- transformers ---

_WORDS: Final = 512  # sequence length as published; most models allow more
_FEW_WORDS: Final = 16


def _transformer(
    title: str,
    classes: str,
    *,
    published: Mapping[str, Any] | None = None,
    small: Mapping[str, Any],
    names: Sequence[str] = ("input_ids",),
    inputs: tuple[Sequence[InputSpec], Sequence[InputSpec]] | None = None,
    result: str = "logits",
    batch: int = 16,
    kind: str = "transformer",
) -> Model:
    # `classes` is the model's and the configuration's, as in "GPT2: LMHeadModel, Config".
    def make(options: Mapping[str, Any]) -> nn.Module:
        library = _import("transformers")
        model_class, config_class = (getattr(library, name) for name in classes.split())
        config = config_class(**options)
        wrapper = Sequences if len(names) > len(given[0]) else Scores
        return wrapper(model_class(config), names, result)

    few = small.get("vocab_size", 0)
    given = inputs or (
        [InputSpec(shape=(_WORDS,), n_values=1000)],
        [InputSpec(shape=(_FEW_WORDS,), n_values=few)],
    )
    large = dict(published or {})
    return Model(
        title=title,
        library="transformers",
        kind=kind,
        published=Size(make=lambda: make(large), inputs=given[0], batch=batch),
        small=Size(make=lambda: make(small), inputs=given[1], batch=4),
    )


_TINY: Final = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_GROUPED: Final = {**_TINY, "num_key_value_heads": 2}
_PAIR: Final = ("input_ids", "decoder_input_ids")
_IMAGE: Final = InputSpec(shape=(3, 224, 224))
_SMALL_IMAGE: Final = InputSpec(shape=(3, 32, 32))
_IMAGES: Final = ([_IMAGE], [_SMALL_IMAGE])
_PIXELS: Final = ("pixel_values",)
_VISION: Final = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}

TRANSFORMERS: Final = {
    "gpt2": _transformer(
        "GPT-2",
        "GPT2LMHeadModel GPT2Config",
        small={"vocab_size": 96, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4},
    ),
    "llama": _transformer(
        "Llama 7B, 4 layers",
        "LlamaForCausalLM LlamaConfig",
        published={"num_hidden_layers": 4, "num_key_value_heads": 8},
        small=_GROUPED,
    ),
    "qwen2": _transformer(
        "Qwen2 7B, 4 layers",
        "Qwen2ForCausalLM Qwen2Config",
        published={"num_hidden_layers": 4, "num_key_value_heads": 8},
        small=_GROUPED,
    ),
    "mistral": _transformer(
        "Mistral 7B, 4 layers",
        "MistralForCausalLM MistralConfig",
        published={"num_hidden_layers": 4},
        small={**_GROUPED, "sliding_window": 8},
    ),
    "mixtral": _transformer(
        "Mixtral 8x7B, 2 layers",
        "MixtralForCausalLM MixtralConfig",
        published={"num_hidden_layers": 2},
        small={**_GROUPED, "num_local_experts": 4},
    ),
    "gemma": _transformer(
        "Gemma 7B, 4 layers",
        "GemmaForCausalLM GemmaConfig",
        published={"num_hidden_layers": 4},
        small={**_GROUPED, "head_dim": 8},
    ),
    "phi3": _transformer(
        "Phi-3 mini, 4 layers",
        "Phi3ForCausalLM Phi3Config",
        published={"num_hidden_layers": 4},
        small={**_GROUPED, "pad_token_id": 0, "max_position_embeddings": 64},
    ),
    "gpt_neox": _transformer(
        "GPT-NeoX 20B, 4 layers",
        "GPTNeoXForCausalLM GPTNeoXConfig",
        published={"num_hidden_layers": 4},
        small=_TINY,
    ),
    "opt": _transformer(
        "OPT 125M",
        "OPTForCausalLM OPTConfig",
        small={
            **_TINY,
            "ffn_dim": 64,
            "word_embed_proj_dim": 32,
            "max_position_embeddings": 32,
        },
    ),
    "bloom": _transformer(
        "BLOOM 560M, 4 layers",
        "BloomForCausalLM BloomConfig",
        published={"hidden_size": 1024, "n_layer": 4, "n_head": 16},
        small={"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    ),
    "bert": _transformer("BERT base", "BertForMaskedLM BertConfig", small=_TINY),
    "distilbert": _transformer(
        "DistilBERT",
        "DistilBertForMaskedLM DistilBertConfig",
        small={"vocab_size": 96, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    ),
    "roberta": _transformer(
        "RoBERTa base",
        "RobertaForMaskedLM RobertaConfig",
        published={"max_position_embeddings": 514},
        small=_TINY,
    ),
    "albert": _transformer(
        "ALBERT base",
        "AlbertForMaskedLM AlbertConfig",
        published={"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
        small={**_TINY, "embedding_size": 16},
    ),
    "electra": _transformer(
        "ELECTRA small",
        "ElectraForMaskedLM ElectraConfig",
        small={**_TINY, "embedding_size": 16},
    ),
    "t5": _transformer(
        "T5 small",
        "T5ForConditionalGeneration T5Config",
        small={
            "vocab_size": 96,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
        },
        names=_PAIR,
    ),
    "bart": _transformer(
        "BART base",
        "BartForConditionalGeneration BartConfig",
        published={
            "d_model": 768,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_ffn_dim": 3072,
            "decoder_ffn_dim": 3072,
            "encoder_attention_heads": 12,
            "decoder_attention_heads": 12,
        },
        small={
            "vocab_size": 96,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "max_position_embeddings": 32,
        },
        names=_PAIR,
    ),
    "whisper": _transformer(
        "Whisper tiny",
        "WhisperForConditionalGeneration WhisperConfig",
        published={"d_model": 384, "encoder_attention_heads": 6, "decoder_attention_heads": 6},
        small={
            "vocab_size": 96,
            "num_mel_bins": 8,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "max_source_positions": 16,
            "max_target_positions": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        names=("input_features", "decoder_input_ids"),
        inputs=(
            [InputSpec(shape=(80, 3000)), InputSpec(shape=(64,), n_values=1000)],
            [InputSpec(shape=(8, 32)), InputSpec(shape=(_FEW_WORDS,), n_values=96)],
        ),
    ),
    "mamba": _transformer(
        "Mamba 130M, 4 layers",
        "MambaForCausalLM MambaConfig",
        published={"num_hidden_layers": 4},
        small={"vocab_size": 96, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2},
        kind="other",
    ),
    "clip": _transformer(
        "CLIP base, pictures",
        "CLIPVisionModelWithProjection CLIPVisionConfig",
        small={**_VISION, "projection_dim": 16},
        names=_PIXELS,
        inputs=_IMAGES,
        result="image_embeds",
    ),
    "clip_text": _transformer(
        "CLIP base, words",
        "CLIPTextModelWithProjection CLIPTextConfig",
        small={**_TINY, "projection_dim": 16, "max_position_embeddings": 16, "eos_token_id": 2},
        inputs=(
            [InputSpec(shape=(77,), n_values=1000)],
            [InputSpec(shape=(_FEW_WORDS,), n_values=96)],
        ),
        result="text_embeds",
    ),
    "vit": _transformer(
        "ViT base",
        "ViTForImageClassification ViTConfig",
        small=_VISION,
        names=_PIXELS,
        inputs=_IMAGES,
    ),
    "swin": _transformer(
        "Swin tiny",
        "SwinForImageClassification SwinConfig",
        small={
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        names=_PIXELS,
        inputs=_IMAGES,
    ),
    "wav2vec2": _transformer(
        "wav2vec 2.0 base, 4 layers",
        "Wav2Vec2ForCTC Wav2Vec2Config",
        published={"num_hidden_layers": 4, "mask_time_prob": 0.0, "layerdrop": 0.0},
        small={
            **_TINY,
            "conv_dim": [16, 16],
            "conv_stride": [5, 4],
            "conv_kernel": [10, 8],
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
            "mask_time_prob": 0.0,
            "layerdrop": 0.0,
        },
        names=("input_values",),
        inputs=([InputSpec(shape=(16000,))], [InputSpec(shape=(400,))]),
    ),
}


# --- torchvision and timm ---


def _vision(
    library: str,
    title: str,
    name: str,
    *,
    pixels: int = 64,
    kind: str = "convolutional",
    published: Mapping[str, Any] | None = None,
    small: Mapping[str, Any] | None = None,
) -> Model:
    function, weights = {
        "torchvision": ("torchvision.models:get_model", {"weights": None}),
        "timm": ("timm:create_model", {"pretrained": False}),
    }[library]

    def make(options: Mapping[str, Any]) -> nn.Module:
        module, _, word = function.partition(":")
        found = getattr(_import(module), word)(name, **weights, **options)
        assert isinstance(found, nn.Module)
        return found

    large = dict(published or {})
    less = {"num_classes": 10, **large, **(small or {})}
    size = 299 if "inception" in name else 224
    return Model(
        title=title,
        library=library,
        kind=kind,
        published=Size(make=lambda: make(large), inputs=[InputSpec(shape=(3, size, size))], batch=32),
        small=Size(make=lambda: make(less), inputs=[InputSpec(shape=(3, pixels, pixels))], batch=4),
    )


def _of_torchvision(title: str, name: str, **options: Any) -> Model:  # noqa: ANN401
    return _vision("torchvision", title, name, **options)


def _of_timm(title: str, name: str, **options: Any) -> Model:  # noqa: ANN401
    return _vision("timm", title, name, **options)


_NO_HEADS: Final = {"aux_logits": False, "init_weights": False}

VISION: Final = {
    "resnet18": _of_torchvision("ResNet-18", "resnet18"),
    "resnet50": _of_torchvision("ResNet-50", "resnet50"),
    "resnext50": _of_torchvision("ResNeXt-50", "resnext50_32x4d"),
    "densenet121": _of_torchvision("DenseNet-121", "densenet121"),
    "alexnet": _of_torchvision("AlexNet", "alexnet"),
    "vgg11": _of_torchvision("VGG-11", "vgg11"),
    "mobilenet_v2": _of_torchvision("MobileNet v2", "mobilenet_v2"),
    "mobilenet_v3": _of_torchvision("MobileNet v3, small", "mobilenet_v3_small"),
    "squeezenet": _of_torchvision("SqueezeNet 1.1", "squeezenet1_1"),
    "efficientnet": _of_torchvision("EfficientNet B0", "efficientnet_b0"),
    "convnext": _of_torchvision("ConvNeXt tiny", "convnext_tiny"),
    "googlenet": _of_torchvision("GoogLeNet", "googlenet", published=_NO_HEADS),
    "inception": _of_torchvision("Inception v3", "inception_v3", pixels=96, published=_NO_HEADS),
    "regnet": _of_torchvision("RegNet Y 400MF", "regnet_y_400mf"),
    "mnasnet": _of_torchvision("MNASNet 0.5", "mnasnet0_5"),
    "shufflenet": _of_torchvision("ShuffleNet v2 0.5", "shufflenet_v2_x0_5"),
    "swin_v2": _of_torchvision("Swin v2 tiny", "swin_v2_t", kind="transformer"),
    "mixer": _of_timm(
        "MLP-Mixer S/32", "mixer_s32_224", kind="other", small={"img_size": 64, "num_blocks": 2}
    ),
    "deit": _of_timm(
        "DeiT tiny",
        "deit_tiny_patch16_224",
        kind="transformer",
        small={"img_size": 64, "depth": 2},
    ),
    "efficientvit": _of_timm("EfficientViT B0", "efficientvit_b0", kind="transformer"),
    "maxvit": _of_timm(
        "MaxViT pico",
        "maxvit_rmlp_pico_rw_256",
        kind="transformer",
        published={"img_size": 224},
        small={"img_size": 64},
    ),
    "nfnet": _of_timm("NFNet light F0", "nfnet_l0"),
    "convmixer": _of_timm(
        "ConvMixer 768/32", "convmixer_768_32", small={"depth": 3, "kernel_size": 7}
    ),
    "cait": _of_timm(
        "CaiT XXS-24",
        "cait_xxs24_224",
        kind="transformer",
        small={"img_size": 64, "depth": 2},
    ),
    "coat": _of_timm("CoAtNet nano", "coatnet_nano_rw_224", small={"img_size": 64}),
    "pvt": _of_timm("PVT v2 B0", "pvt_v2_b0", kind="transformer"),
    "poolformer": _of_timm("PoolFormer S12", "poolformer_s12"),
    "ghostnet": _of_timm("GhostNet", "ghostnet_100"),
    "levit": _of_timm("LeViT 128S", "levit_128s", pixels=224, kind="transformer"),
    "mobilevit": _of_timm("MobileViT XXS", "mobilevit_xxs", kind="transformer"),
}

MODELS: Final[Mapping[str, Model]] = TRANSFORMERS | VISION


def __getattr__(name: str) -> Callable[[], nn.Module]:
    try:
        return MODELS[name].small.make
    except KeyError:
        raise AttributeError(name) from None
