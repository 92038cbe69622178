"""Tiny models of transformers' architectures: built from their configs, with generated inputs; nothing is downloaded.

Input: the name of an architecture, a key of `transformers.CONFIG_MAPPING`. Output: `Tiny`, a seeded model in fp32
without dropout and other noise, in training mode, and the arguments of its forward pass. `shrunk` makes a config small
by the names of its fields; `OVERRIDES` has what the names do not tell.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

SEED = 15
VOCABULARY, HIDDEN, INNER, HEADS, HEAD, LENGTH, IMAGE, PATCH = 99, 32, 64, 4, 8, 12, 64, 8
SAMPLES = 6400  # of a recording: 0.4 s at 16 kHz
CLASSES = 5

HEADS_OF_TASKS = (  # transformers' tasks, as names of its mappings; an architecture is built for the first that has it
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_TEXT_TO_TEXT",
    "MASKED_LM",
    "CAUSAL_LM",
    "CTC",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "IMAGE_CLASSIFICATION",
    "OBJECT_DETECTION",
    "UNIVERSAL_SEGMENTATION",
    "SEMANTIC_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "AUDIO_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "TIME_SERIES_PREDICTION",
    "QUESTION_ANSWERING",
    "TOKEN_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION",
    "IMAGE_TO_IMAGE",
    "PRETRAINING",
    "",  # the model without a head
)

# A field whose name matches gets the value, if its default is a larger integer. The first match decides.
SIZES: tuple[tuple[str, int], ...] = (
    (r"type_vocab_size|num_labels|num_channels|in_channels|in_chans", 10**9),
    (r".*vocab_size.*|vocab_size", VOCABULARY),
    (r".*(max_.*positions?|position_embeddings|n_positions|n_ctx|max_seq_len|max_length).*", 128),
    (r".*(lora_rank|low_rank).*", 16),
    (r".*(qk_nope_head_dim|qk_rope_head_dim|v_head_dim|head_dim|d_kv|kv_channels|head_size|qk_head_dim).*", HEAD),
    (r"rotary_dim", 4),
    (r"window_size", 4),
    (r".*(num_attention_heads|attention_heads|num_heads|n_heads|n_head|_heads)", HEADS),
    (r".*(layers|n_layer|num_hidden_groups|depth|num_blocks|n_blocks)", 2),
    (r".*(experts_per_tok|moe_top_?k|num_selected_experts|moe_k)", 2),
    (r"(n_group|topk_group|first_k_dense_replace)", 1),
    (r".*(num_experts|n_routed_experts|num_local_experts|n_experts|moe_num_experts)", 4),
    (r".*(intermediate_size|ffn_dim|d_ff|d_inner|n_inner|mlp_dim|ffn_hidden_size|feed_forward.*|ffn_.*_size)", INNER),
    (
        r".*(hidden_size|hidden_dim|d_model|n_embd|embed_dim|embed_dims|embedding_size|projection_dim|_width|"
        r"feature_size|hidden_channels|word_embed_proj_dim|output_dim|image_text_hidden_size|dim|emb_dim)",
        HIDDEN,
    ),
    (r".*image_size|input_size|img_size", IMAGE),
    (r"patch_size", PATCH),
    (r"num_queries|num_object_queries|decoder_num_queries", 10),
    (r"num_denoising", 4),
    (r"num_query_tokens", 4),
    (r"num_frames", 4),
)
KEY_VALUE_HEADS = r".*key_value_heads|.*kv_heads|n_head_kv"  # as many as heads where the default says so
LISTS: tuple[tuple[str, int], ...] = (  # lists of integers: the largest first element; the others keep their ratio
    (r"depths|encoder_blocks|layer_depths|num_blocks", 1),
    (r".*(hidden_sizes|embed_dims?|dims|channels|conv_dim|tdnn_dim)", 16),
    (r".*(num_heads|num_attention_heads)", 2),
    (r"image_size|input_size|img_size", IMAGE),
)

RESNET = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 32, 32, 32],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "out_features": ["stage2", "stage3", "stage4"],
}
WITHOUT_TIMM = {"use_timm_backbone": False, "backbone": None, "backbone_config": {**RESNET, "out_features": ["stage4"]}}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
HALVES = {"encoder_in_channels": [32, 64, 128], "decoder_in_channels": [32, 32, 32]}

OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "rt_detr": HALVES,
    "rt_detr_v2": HALVES,
    "detr": WITHOUT_TIMM,
    "conditional_detr": WITHOUT_TIMM,
    "dab-detr": WITHOUT_TIMM,
    "table-transformer": WITHOUT_TIMM,
    "deformable_detr": {**WITHOUT_TIMM, "backbone_config": RESNET},
    "blip-2": {"image_token_index": 90},
    "instructblip": {"image_token_index": 90},
    "autoformer": {"prediction_length": 8},
    "informer": {"prediction_length": 8},
    "time_series_transformer": {"prediction_length": 8},
    "bit": {"num_groups": 4},
    "esm": {"vocab_size": 99, "pad_token_id": 0, "mask_token_id": 98},
    "swin": {"window_size": 2},
    "donut-swin": {"window_size": 2},
    "led": {"attention_window": [4, 4], "max_encoder_position_embeddings": 128},
    "levit": {"image_size": 224, "patch_size": 16, "hidden_sizes": [16, 32, 48], "num_attention_heads": [2, 2, 2]},
    "lilt": {"hidden_size": 48, "channel_shrink_ratio": 4, "num_attention_heads": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "hidden_size": 32, "expand": 2, "n_groups": 1, "state_size": 16},
    "mobilevit": {"num_attention_heads": 2, "hidden_sizes": [16, 24, 32]},
    "moonshine": {"pad_token_id": 0},
    "nemotron": {"num_key_value_heads": 4},
    "nemotron_h": {"n_groups": 1, "mamba_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "ministral": {"head_dim": 8},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16, 16, 16, 16]},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0, "model_type": ""}},
    "zamba2": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"]},
    "canary": {"encoder_config": {"subsampling_conv_channels": 16}},
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "glm4v", "glm46v", "glm_image", "glm_ocr", "glmga"), {"text_config": ROPE}
    ),
    "paddleocr_vl": {"text_config": ROPE},
    "colqwen2": {"vlm_config": {"text_config": ROPE}},
    **dict.fromkeys(("parakeet_ctc", "parakeet_tdt", "lasr_ctc"), {"encoder_config": {"num_key_value_heads": 4}}),
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [2, 6], "attn_layers": ["local", "lsh"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "xmod": {"default_language": "en_XX"},
    "wav2vec2-bert": {"vocab_size": 99},
    "wav2vec2-conformer": {"vocab_size": 99},
    "siglip": {"text_config": {"projection_size": 32}},
    "siglip2": {"text_config": {"projection_size": 32}},
    "speech_to_text": {"conv_channels": 32, "input_feat_per_channel": 80},
    "esmc": {"num_key_value_heads": 4},
    "yolos": {"image_size": [64, 64]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "num_hidden_layers": 2},
}

PART = r"((vision|text|audio|vit|qformer|vqmodel|encoder|decoder|model|hiera_det|tokenizer)_?)+"
"""What follows the name of an architecture in the name of a part of it."""
WHOLE = ("qwen2_audio",)
"""Architectures whose names read as that of a part."""


class Absent(Exception):
    """An architecture that cannot be built tiny here; the message is the reason."""


@dataclasses.dataclass
class Tiny:
    """A tiny model and its batch: `arguments` of the forward pass; `task` is the name of its mapping."""

    name: str
    task: str
    model: nn.Module
    arguments: dict[str, Any]


def size(name: str, value: Any) -> Any:
    """Return the value of a field of a tiny config: `value` itself where the name says nothing."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        limit = next((most for pattern, most in SIZES if re.fullmatch(pattern, name)), None)
        return value if limit is None else min(value, limit)
    if isinstance(value, float):
        return 0.0 if re.fullmatch(r".*(drop|jitter).*", name) else value
    if isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value):
        limit = next((most for pattern, most in LISTS if re.fullmatch(pattern, name)), None)
        if limit is not None:
            if limit == 1:
                return [min(v, 1) for v in value]
            first = max(1, value[0])
            return [max(limit, limit * v // first) if v > limit else v for v in value] if first > limit else list(value)
    return value


def token(name: str, value: Any, taken: dict[str, int]) -> Any:
    """Return the number of a special token: below the vocabulary's size, and another one for each name."""
    first = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    if name in first:
        return first[name]
    return taken.setdefault(name, VOCABULARY - 1 - len(taken))


def shrunk(kind: type[Any], given: Any = None, *, taken: dict[str, int] | None = None) -> dict[str, Any]:
    """Return the arguments that make a config of this class tiny.

    Args:
        kind: a config class.
        given: an instance with the defaults to start from; default: that of the class.
        taken: the special tokens so far, one number for each name.
    """
    from transformers import PreTrainedConfig

    taken = {} if taken is None else taken
    config = kind() if given is None else given
    names = {f.name for f in dataclasses.fields(kind)}
    found: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            inner = shrunk(type(value), value, taken=taken)
            found[name] = {**value.to_dict(), **inner, "model_type": value.model_type}
            for derived in ("layer_types", "rope_parameters", "mlp_layer_types", "stage_names"):
                if derived not in inner:
                    found[name].pop(derived, None)
            if "out_indices" in inner:
                found[name].pop("out_features", None)
            continue
        if name not in names:
            continue
        if re.fullmatch(KEY_VALUE_HEADS, name) and isinstance(value, int):
            found[name] = HEADS if value == getattr(config, "num_attention_heads", None) else min(value, 2)
            continue
        if re.fullmatch(r".*_token_id|.*_token_index|.*_token_ids?", name) and isinstance(value, int):
            found[name] = token(name, value, taken)
        elif (new := size(name, value)) != value:
            found[name] = new
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    if len(kinds) > 1 and "layer_types" in names:  # one layer of each kind
        found |= {"layer_types": kinds, "num_hidden_layers": len(kinds)}
    features = getattr(config, "out_features", None)
    if features and "num_hidden_layers" in names:
        found |= {"num_hidden_layers": max(2, len(features)), "out_indices": list(range(1, 1 + len(features)))}
        found["out_features"] = None
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and "mrope_section" in rope:
        half = int(found.get("head_dim", HEAD) * rope.get("partial_rotary_factor", 1.0)) // 2
        found["rope_parameters"] = {**rope, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    return found


def config_of(name: str) -> Any:
    """Return a tiny config of an architecture."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[name]
    arguments = shrunk(kind)
    for key, value in OVERRIDES.get(name, {}).items():
        if isinstance(value, Mapping) and isinstance(arguments.get(key), dict) and "model_type" not in value:
            arguments[key].update(value)
        else:
            arguments[key] = value
    config = kind(**arguments)
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    return config


def tasks_of(name: str) -> dict[str, str]:
    """Return the tasks of an architecture, in the order of `HEADS_OF_TASKS`, each with the name of its model class."""
    from transformers.models.auto import modeling_auto

    found = {}
    for task in HEADS_OF_TASKS:
        mapping = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES" if task else "MODEL_MAPPING_NAMES")
        if name in mapping:
            found[task or "MODEL"] = mapping[name] if isinstance(mapping[name], str) else mapping[name][0]
    return found


def model_class(name: str) -> tuple[str, Any]:
    """Return the task and the model class of an architecture."""
    import transformers

    for task, chosen in tasks_of(name).items():
        if (kind := getattr(transformers, chosen, None)) is not None:
            return task, kind
    raise Absent("transformers exports no model class of it")


def names() -> list[str]:
    """Return the names of all architectures that have a model class and are not a part of another one.

    A part is named after the whole: `clip_vision_model` is left out where `clip` is there.
    """
    from transformers import CONFIG_MAPPING

    found = {name for name in CONFIG_MAPPING if tasks_of(name)}

    def part(name: str) -> bool:
        cuts = [match.start() for match in re.finditer("_", name)]
        return any(name[:cut] in found and re.fullmatch(PART, name[cut + 1 :]) for cut in cuts)

    return sorted(name for name in found if name in WHOLE or not part(name))


# ------------------------------------------------------------------ inputs


def field(config: Any, *wanted: str) -> Any:
    """Return the first of the fields that a config or one of its parts has and that is not None."""
    parts = [config, *(getattr(config, key, None) for key in ("text_config", "vision_config", "audio_config"))]
    parts += [getattr(config, key, None) for key in ("encoder", "decoder", "backbone_config", "encoder_config")]
    for key in wanted:
        for part in parts:
            value = getattr(part, key, None)
            if value is not None:
                return value
    return None


def pair(value: Any) -> tuple[int, int]:
    """Return height and width of an image size, which configs write in many ways."""
    if value is None:
        return IMAGE, IMAGE
    if isinstance(value, dict):
        value = (value["height"], value["width"])
    if isinstance(value, (list, tuple)):
        return (int(value[0]), int(value[1])) if len(value) > 1 else (int(value[0]),) * 2
    return int(value), int(value)


def tokens(config: Any, *shape: int) -> Tensor:
    """Return random tokens that are not special."""
    most = field(config, "vocab_size") or VOCABULARY
    most = most if isinstance(most, int) else VOCABULARY
    return torch.randint(5, min(most, VOCABULARY) - 30 if most > 60 else most, shape)


def inputs(name: str, task: str, model: nn.Module, config: Any) -> dict[str, Any]:
    """Return arguments of a model's forward pass: two examples, labels where it takes them.

    The signature and the names in it decide; `SPECIAL` has the architectures for which that is not enough.
    """
    seed(SEED)
    if name in SPECIAL:
        return dict(SPECIAL[name](config))
    known = inspect.signature(type(model).forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    found: dict[str, Any] = {}
    is_text = "input_ids" in known and (main == "input_ids" or task in TEXT or name in BOTH)
    if is_text:
        found["input_ids"] = tokens(config, 2, LENGTH)
        if "attention_mask" in known:
            found["attention_mask"] = torch.ones(2, LENGTH, dtype=torch.long)
    if "pixel_values" in known and (main == "pixel_values" or name in BOTH or task == "ZERO_SHOT_IMAGE_CLASSIFICATION"):
        height, width = pair(field(config, "image_size", "input_size", "img_size"))
        channels = field(config, "num_channels", "in_channels", "in_chans") or 3
        channels = channels if isinstance(channels, int) else 3
        frames = field(config, "num_frames") if task == "VIDEO_CLASSIFICATION" else None
        found["pixel_values"] = torch.randn(2, *((frames,) if frames else ()), channels, height, width)
    for key in ("pixel_values_videos", "video"):
        if key in known and main == key:
            frames = field(config, "num_frames", "frames_per_clip") or 4
            found[key] = torch.randn(2, frames, 3, *pair(field(config, "image_size", "crop_size")))
    if "input_values" in known and main == "input_values":
        bins = field(config, "num_mel_bins")
        long = field(config, "max_length") or 64
        found["input_values"] = (
            torch.randn(2, long, bins) if bins and task == "AUDIO_CLASSIFICATION" else torch.randn(2, SAMPLES)
        )
    if "input_features" in known and main == "input_features":
        bins = field(config, "num_mel_bins", "input_feat_per_channel", "input_channels", "feature_size") or 80
        long = 2 * (field(config, "max_source_positions") or 32)
        transposed = (2, bins, long) if "whisper" in name or task == "SPEECH_SEQ_2_SEQ" else (2, 64, bins)
        found["input_features"] = torch.randn(transposed)
    if "past_values" in known and main == "past_values":
        found |= series(config, known)
    encoder_decoder = getattr(config, "is_encoder_decoder", False)
    if "labels" in known:
        made = labels(task, config, found, known)
        if made is not None:
            found["labels"] = made
    elif "decoder_input_ids" in known and encoder_decoder:
        found["decoder_input_ids"] = tokens(config, 2, LENGTH)
    if task in ("UNIVERSAL_SEGMENTATION",) and "mask_labels" in known:
        height, width = found["pixel_values"].shape[-2:]
        found["mask_labels"] = [torch.randint(0, 2, (2, height, width)).float() for _ in range(2)]
        found["class_labels"] = [torch.tensor([0, 1]) for _ in range(2)]
    if task == "QUESTION_ANSWERING" and "start_positions" in known:
        found |= {"start_positions": torch.tensor([1, 3]), "end_positions": torch.tensor([4, 6])}
    if task == "IMAGE_TEXT_TO_TEXT" and "pixel_values" not in found:
        found |= pictures(model, config, found, known)
    if "return_loss" in known:
        found["return_loss"] = True
    return found


def pictures(model: nn.Module, config: Any, found: dict[str, Any], known: Any) -> dict[str, Any]:
    """Return images, and tokens with as many places for them as they have features; {} where that does not work."""
    find = getattr(model, "get_image_features", None)
    place = next(
        (v for k in ("image_token_id", "image_token_index") if (v := getattr(config, k, None)) is not None), None
    )
    if find is None or place is None or "pixel_values" not in known or "input_ids" not in found:
        return {}
    vision = getattr(config, "vision_config", None)
    side = pair(field(vision, "image_size", "img_size")) if vision is not None else (IMAGE, IMAGE)
    patch = getattr(vision, "patch_size", None)
    choices: list[dict[str, Any]] = [{"pixel_values": torch.randn(2, 3, *side)}]
    choices.append({"pixel_values": torch.randn(2, 1, 3, *side)})
    choices.append({"pixel_values": torch.randn(2, 3, *side), "image_sizes": torch.tensor([list(side)] * 2)})
    choices.append({"pixel_values": torch.randn(2, 2, 3, *side), "image_sizes": torch.tensor([list(side)] * 2)})
    if isinstance(patch, int):
        values = 3 * (getattr(vision, "temporal_patch_size", None) or 1) * patch**2
        grid = torch.tensor([[1, 4, 4]] * 2)
        choices.append({"pixel_values": torch.randn(32, values), "image_grid_thw": grid})
        types = {"mm_token_type_ids": None} if "mm_token_type_ids" in known else {}
        choices.append({"pixel_values": torch.randn(32, values), "image_grid_thw": grid, **types})
    for choice in choices:
        try:
            with torch.no_grad():
                features = find(**{k: v for k, v in choice.items() if v is not None})
                features = getattr(features, "pooler_output", features)
                whole = torch.cat(list(features)) if isinstance(features, (list, tuple)) else features
                places = whole.numel() // whole.shape[-1] // 2
                ids = torch.cat([torch.full((2, places), place), found["input_ids"]], 1)
                filled = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
                if "labels" in known:
                    filled["labels"] = torch.where(ids == place, -100, ids)
                if "mm_token_type_ids" in choice:
                    filled["mm_token_type_ids"] = (ids == place).long()
                made = {**choice, **filled}
                if any(v.is_floating_point() and not v.isfinite().all() for v in made.values()):
                    continue
                model(**made)
            return made
        except Exception:
            continue
    return {}


TEXT = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "ZERO_SHOT_IMAGE_CLASSIFICATION")
TOKENS = (*TEXT, "SPEECH_SEQ_2_SEQ", "CTC")


def labels(task: str, config: Any, found: dict[str, Any], known: Any) -> Any:
    """Return the labels of a task; None for a task without."""
    if task == "CTC":
        return tokens(config, 2, 3)
    if task == "SPEECH_SEQ_2_SEQ":
        return tokens(config, 2, LENGTH)
    if task in TOKENS or (task == "PRETRAINING" and "input_ids" in found):
        return tokens(config, 2, LENGTH) if task == "SEQ_TO_SEQ_CAUSAL_LM" else found["input_ids"].clone()
    if task in ("IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION", "SEQUENCE_CLASSIFICATION"):
        return torch.tensor([0, 1])
    if task == "TOKEN_CLASSIFICATION":
        return torch.randint(0, 2, (2, LENGTH))
    if task == "OBJECT_DETECTION":
        boxes = torch.tensor([[0.3, 0.3, 0.2, 0.2], [0.6, 0.6, 0.3, 0.2]])
        return [{"class_labels": torch.tensor([0, 1]), "boxes": boxes.clone()} for _ in range(2)]
    if task == "SEMANTIC_SEGMENTATION":
        return torch.randint(0, 2, (2, *found["pixel_values"].shape[-2:]))
    if task == "DEPTH_ESTIMATION":
        return None
    return None


def series(config: Any, known: Any) -> dict[str, Any]:
    """Return the arguments of a model of time series."""
    context = getattr(config, "context_length", 32)
    lags = max(getattr(config, "lags_sequence", None) or [0])
    horizon = getattr(config, "prediction_length", None) or 8
    channels = getattr(config, "num_input_channels", None)
    if "past_time_features" not in known:
        found = {"past_values": torch.randn(2, context, channels or 1)}
        if "future_values" in known:
            found["future_values"] = torch.randn(2, horizon, channels or 1)
        return found
    features = getattr(config, "num_time_features", 0) or 0
    past = context + lags
    return {
        "past_values": torch.randn(2, past),
        "past_time_features": torch.randn(2, past, features),
        "past_observed_mask": torch.ones(2, past),
        "future_values": torch.randn(2, horizon),
        "future_time_features": torch.randn(2, horizon, features),
    }


BOTH = ("aimv2", "git", "grounding-dino", "groupvit", "mm-grounding-dino", "owlv2", "owlvit", "vilt")
"""Architectures that take text and images, whatever their main input is."""


def boxed(config: Any) -> dict[str, Any]:
    """Return text with the boxes of its words on a page."""
    ids = tokens(config, 2, LENGTH)
    corner = torch.randint(0, 50, (2, LENGTH, 2))
    box = torch.cat([corner, corner + torch.randint(1, 50, (2, LENGTH, 2))], -1)
    return {"input_ids": ids, "bbox": box, "attention_mask": torch.ones_like(ids)}


SPECIAL: Mapping[str, Any] = {
    "bros": lambda config: {**boxed(config), "bbox": torch.rand(2, LENGTH, 8)},
    "udop": lambda config: {**boxed(config), "bbox": torch.rand(2, LENGTH, 4), "labels": tokens(config, 2, LENGTH)},
    "clap": lambda config: {"input_ids": tokens(config, 2, LENGTH), "input_features": torch.randn(2, 1, 64, 64)},
    "dac": lambda config: {"input_values": torch.randn(2, 1, 1024)},
    "vision-text-dual-encoder": lambda config: {
        "input_ids": tokens(config, 2, LENGTH),
        "pixel_values": torch.randn(2, 3, IMAGE, IMAGE),
        "return_loss": True,
    },
    "lxmert": lambda config: {
        "input_ids": tokens(config, 2, LENGTH),
        "visual_feats": torch.randn(2, 4, config.visual_feat_dim),
        "visual_pos": torch.rand(2, 4, 4),
    },
    "visual_bert": lambda config: {
        "input_ids": tokens(config, 2, LENGTH),
        "attention_mask": torch.ones(2, LENGTH, dtype=torch.long),
        "visual_embeds": torch.randn(2, 4, config.visual_embedding_dim),
    },
    "decision_transformer": lambda config: {
        "states": torch.randn(2, 5, config.state_dim),
        "actions": torch.randn(2, 5, config.act_dim),
        "rewards": torch.randn(2, 5, 1),
        "returns_to_go": torch.randn(2, 5, 1),
        "timesteps": torch.arange(5).expand(2, 5),
        "attention_mask": torch.ones(2, 5),
    },
}


def build(name: str) -> Tiny:
    """Return a tiny model of an architecture and its batch.

    Raises:
        Absent: it has no model class.
    """
    task, kind = model_class(name)
    config = config_of(name)
    seed(SEED)
    model = kind(config)
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    model.train()
    return Tiny(name, task, model, inputs(name, task, model, config))


def loss_fn(model: nn.Module, **arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the loss of a model, and its first output; without one that of its outputs to random values."""
    out = model(**arguments)
    floats = [v for v in flat(out) if v.is_floating_point()]
    loss = getattr(out, "loss", None)
    if loss is not None:
        others = [v for v in floats if v is not loss and v.numel() > 1]
        return loss.mean(), others[0] if others else loss
    learned = [v for v in floats if v.requires_grad] or floats
    return torch.stack([to_random(v) for v in learned]).mean(), learned[0]


def to_random(output: Tensor) -> Tensor:
    """Return the mean squared difference of an output to random values, always the same ones."""
    wanted = torch.randn(output.shape, generator=torch.Generator().manual_seed(SEED))
    return nn.functional.mse_loss(output.float(), wanted)


def flat(out: Any) -> list[Tensor]:
    """Return the tensors of an output, in their order."""
    if isinstance(out, Tensor):
        return [out]
    parts = out.values() if isinstance(out, Mapping) else out if isinstance(out, (list, tuple)) else ()
    return [tensor for part in parts for tensor in flat(part)]


def seed(number: int) -> None:
    """Seed every generator that a model may draw from: some draw their masks by numpy."""
    from transformers import set_seed

    set_seed(number)


def count(model: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(math.prod(p.shape) for p in model.parameters())
