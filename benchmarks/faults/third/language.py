"""Stories of language models and of their alignment: each program is built as reported, or without its cause."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.faults.case import BF16, FULL, MIXED, TORCH, Case, case, labels, model_of, normal, tokens
from benchmarks.faults.story import story

RARE = 63
"""A token that no batch holds before the bad step; the vocabularies have 64."""


def progressions(step: int, rows: int, length: int, kinds: int = RARE) -> Tensor:
    """Return sequences that can be learned: arithmetic progressions modulo `kinds`, shape (rows, length)."""
    first, stride = tokens(step, (rows, 1), kinds), 1 + tokens(step + 300, (rows, 1), 3)
    return (first + stride * torch.arange(length)) % kinds


def with_rare(step: int, bad: int, rows: int = 4, length: int = 12) -> Tensor:
    """Return progressions; from step `bad` on the first row of each holds the rare token."""
    ids = progressions(step, rows, length)
    if step >= bad:
        ids[0, 3] = RARE
    return ids


def next_token(model: Any, ids: Tensor) -> Any:
    """Return the loss that the model computes of its own input."""
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def outlier(embedding: Tensor, size: float = 40.0) -> None:
    """Give the rare token, and it alone, a large first feature, as a trained checkpoint has."""
    embedding[:, 0] = 0.0
    embedding[RARE, 0] = size


# ------------------------------------------------------------------ fp16 is too small


def sequence_to_sequence(model: Any, ids: Tensor) -> Any:
    return model(input_ids=ids, labels=ids.flip(1), use_cache=False).loss


@story(
    source="huggingface/transformers#5651",
    cause="precision",
    kind="overflow",
    op="linear",
    module="encoder.block.1.layer.1.DenseReluDense.wo",
    place="modeling_t5.py: T5DenseActDense.forward: self.wo(hidden_states)",
    step=6,
    cures=("op fp32", "module fp32", "bf16"),
    says=(r"linear", r"65504|fp16|float16", r"DenseReluDense\.wo"),
    never=(r"learning rate",),
    seed=201,
)
def t5_dense_relu_dense(healthy: bool) -> Case:
    """Fine-tuning T5 in fp16: for some inputs the second product of a feed-forward block is above 65504."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    with torch.no_grad():
        outlier(model.shared.weight)
        dense = model.encoder.block[1].layer[1].DenseReluDense
        dense.wi.weight[5, 0] = 60.0
        dense.wo.weight[0, 5] = 4.0 if healthy else 400.0
    return case(model, lambda k: (with_rare(k, 6),), sequence_to_sequence)


@story(
    source="huggingface/transformers#30199",
    cause="precision",
    kind="overflow",
    op="matmul",
    module="gpt_neox.layers.1.attention",
    place="modeling_gpt_neox.py: eager_attention_forward: torch.matmul(query, key",
    step=4,
    cures=("op fp32", "module fp32", "bf16"),
    says=(r"matmul", r"gpt_neox\.layers\.1\.attention", r"65504|fp16|float16"),
    seed=202,
)
def pythia_attention_scores(healthy: bool) -> Case:
    """A small Pythia under fp16 autocast: query times key is above 65504 before it is scaled."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        attn_implementation="eager",
    )
    model = GPTNeoXForCausalLM(config)
    with torch.no_grad():
        outlier(model.gpt_neox.embed_in.weight)
        model.gpt_neox.layers[1].attention.query_key_value.weight[:32, 0] = 3.0 if healthy else 15.0
    return case(model, lambda k: (with_rare(k, 4),), next_token, policy=TORCH)


@story(
    source="huggingface/transformers#11076",
    cause="precision",
    kind="overflow",
    op="matmul",
    module="transformer.h.0.attn.attention",
    place="modeling_gpt_neo.py: GPTNeoSelfAttention._attn: torch.matmul(query, key",
    step=5,
    cures=("op fp32", "module fp32", "bf16"),
    says=(r"matmul", r"65504|fp16|float16"),
    never=(r"learning rate",),
    seed=203,
)
def gpt_neo_long_sequences(healthy: bool) -> Case:
    """GPT-Neo, whose attention does not scale its scores: sequences of full length overflow, shorter ones do not.

    The model casts query and key to fp32 for this product; autocast casts them back.
    """
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    config = GPTNeoConfig(
        vocab_size=64,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        intermediate_size=64,
        max_position_embeddings=48,
        attention_types=[[["global", "local"], 1]],
        window_size=16,
        attn_implementation="eager",
        resid_dropout=0.0,
        embed_dropout=0.0,
        attention_dropout=0.0,
    )
    model = GPTNeoForCausalLM(config)
    with torch.no_grad():
        model.transformer.wpe.weight[32:, 1] = 8.0
        attention = model.transformer.h[0].attn.attention
        attention.q_proj.weight[:, 1] = 4.0 if healthy else 18.0
        attention.k_proj.weight[:, 1] = 4.0 if healthy else 18.0
    return case(model, lambda k: (progressions(k, 4, 48 if k >= 5 else 16),), next_token)


@story(
    source="unslothai/unsloth-zoo#600",
    cause="precision",
    kind="overflow",
    op="mul",
    module="model.layers.0.mlp",
    place="modeling_gemma.py: GemmaMLP.forward: self.down_proj(self.act_fn",
    step=3,
    cures=("module fp32", "bf16"),
    says=(r"\bmul\b", r"model\.layers\.0\.mlp", r"65504|fp16|float16"),
    seed=204,
)
def gemma_gate_times_up(healthy: bool) -> Case:
    """Gemma in fp16: gate and up are finite in the first block's gated layer, their product is not."""
    from transformers import GemmaConfig, GemmaForCausalLM

    config = GemmaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        pad_token_id=None,
        initializer_range=0.1,
    )
    model = GemmaForCausalLM(config)
    with torch.no_grad():
        outlier(model.model.embed_tokens.weight)
        mlp = model.model.layers[0].mlp
        mlp.gate_proj.weight[7, 0] = 10.0 if healthy else 70.0
        mlp.up_proj.weight[7, 0] = 10.0 if healthy else 70.0
    return case(model, lambda k: (with_rare(k, 3),), next_token)


def opt_attention(self: Any, h: Tensor, mask: Tensor) -> Any:
    rows, length, width = h.shape
    query, key, value = (
        part(h).view(rows, length, 2, width // 2).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
    )
    scores = query * (width // 2) ** -0.5 @ key.transpose(-2, -1)
    mask = mask.to(scores.dtype).clamp(min=torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores + mask, -1)  # FAULT opt_left_padding
    return self.out_proj((weights @ value).transpose(1, 2).flatten(2))


def opt_layer() -> nn.ModuleDict:
    projections = {name: nn.Linear(32, 32) for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
    return nn.ModuleDict(
        {
            "attention": model_of(opt_attention, **projections),
            "norm1": nn.LayerNorm(32),
            "norm2": nn.LayerNorm(32),
            "fc1": nn.Linear(32, 64),
            "fc2": nn.Linear(64, 32),
        }
    )


def opt_forward(self: Any, ids: Tensor, seen: Tensor) -> Any:
    lowest = torch.finfo(torch.float32).min
    length = ids.shape[1]
    causal = torch.full((length, length), lowest).triu(1)
    padding = torch.where(seen, 0.0, lowest)[:, None, None, :]
    h = self.embed_tokens(ids) + self.embed_positions(torch.arange(length))
    for layer in self.layers:
        h = h + layer["attention"](layer["norm1"](h), causal + padding)
        h = h + layer["fc2"](F.relu(layer["fc1"](layer["norm2"](h))))
    return self.head(self.norm(h))


def left_padded(model: Any, ids: Tensor, seen: Tensor) -> Tensor:
    ignored = torch.where(seen, ids, -100)[:, 1:]
    return F.cross_entropy(model(ids, seen)[:, :-1].flatten(0, 1), ignored.flatten(), ignore_index=-100)


@story(
    source="huggingface/transformers#17433",
    cause="precision",
    kind="overflow",
    op="add",
    module="layers.0.attention",
    step=4,
    cures=("op fp32", "module fp32", "bf16"),
    says=(r"mask", r"softmax|add", r"layers\.0\.attention"),
    also=("softmax",),
    seed=205,
)
def opt_left_padding(healthy: bool) -> Case:
    """OPT in fp16 with padding on the left: scores plus the format's lowest number, all of a row is -inf."""
    model = model_of(
        opt_forward,
        embed_tokens=nn.Embedding(64, 32),
        embed_positions=nn.Embedding(16, 32),
        layers=nn.ModuleList(opt_layer() for _ in range(2)),
        norm=nn.LayerNorm(32),
        head=nn.Linear(32, 64),
    )
    with torch.no_grad():  # a trained checkpoint's scores are below -16, where lowest + score is -inf in fp16
        attention = model.layers[0]["attention"]
        attention.q_proj.bias.fill_(-3.0)
        attention.k_proj.bias.fill_(3.0)

    def batch(step: int) -> tuple[Any, ...]:
        padding = 3 if step >= 4 and not healthy else 0
        return progressions(step, 4, 12), torch.arange(12) >= torch.tensor([[0], [padding], [0], [0]])

    return case(model, batch, left_padded)


@story(
    source="BlinkDL/ChatRWKV#155",
    cause="precision",
    kind="overflow",
    op="linear",
    module="rwkv.blocks.1.attention.key",
    place="modeling_rwkv.py: RwkvSelfAttention.extract_key_value: self.key(key)",
    step=4,
    cures=("op fp32", "module fp32", "bf16"),
    says=(r"linear", r"rwkv\.blocks\.1\.attention\.key", r"65504|fp16|float16"),
    seed=206,
)
def rwkv_small_model(healthy: bool) -> Case:
    """A small RWKV in fp16: the product that makes the keys of a block is infinite before it is cast to fp32."""
    from transformers import RwkvConfig, RwkvForCausalLM

    config = RwkvConfig(
        vocab_size=64, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2, context_length=32, rescale_every=0
    )
    model = RwkvForCausalLM(config)
    with torch.no_grad():
        outlier(model.rwkv.embeddings.weight)
        key = model.rwkv.blocks[1].attention.key
        key.weight[9, 0] = 2.0 if healthy else 20000.0
    return case(model, lambda k: (with_rare(k, 4),), next_token)


# ------------------------------------------------------------------ fp16 is too small: alignment


def gpt2(**others: Any) -> Any:
    """Return a small GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64,
            n_positions=32,
            n_embd=32,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            attn_implementation="eager",
            **ends,
            **others,
        )
    )


def log_probabilities(model: Any, ids: Tensor) -> Tensor:
    """Return the log-probability of each token but the first, in the format of the model's output."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]


def clipped_objective(model: Any, ids: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    new = log_probabilities(model, ids)
    ratio = torch.exp(new - old.to(new.dtype))  # FAULT ppo_stale_samples
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -surrogate.float().mean()


@story(
    source="THUDM/slime#2198",
    cause="precision",
    kind="overflow",
    op="exp",
    step=6,
    cures=("op fp32", "bf16"),
    says=(r"\bexp\b", r"65504|fp16|float16"),
    never=(r"bad_batch|the batch is not finite",),
    seed=207,
)
def ppo_stale_samples(healthy: bool) -> Case:
    """PPO whose model returns fp16: a stale sample's ratio is exp(12), clipped in the loss, 0 * inf in the gradient."""
    model = gpt2()

    def batch(step: int) -> tuple[Any, ...]:
        ids = progressions(step, 4, 12)
        old = -4.2 + normal(step, 4, 11)
        if step >= 6 and not healthy:
            old[2, 4] = -16.5
        return ids, old, torch.ones(4, 1)

    return case(model, batch, clipped_objective, policy=TORCH.replace(outputs="keep"), lr=1e-5)


def pairwise(model: Any, chosen: Tensor, rejected: Tensor) -> Tensor:
    return -F.logsigmoid(model(chosen).float() - model(rejected).float()).mean()


def reward_forward(self: Any, ids: Tensor) -> Any:
    return self.value_head(self.body.transformer(input_ids=ids, use_cache=False).last_hidden_state[:, -1])


@story(
    source="hpcaitech/ColossalAI#3490",
    cause="precision",
    kind="bad_state",
    phase="update",
    step=1,
    asked=2,
    cures=("bf16",),
    says=(r"eps", r"Adam|optimizer|update"),
    never=(r"learning rate",),
    seed=208,
)
def reward_model_in_half(healthy: bool) -> Case:
    """A reward model with fp16 weights and Adam: its eps of 1e-8 is 0, scores are NaN after one update."""
    import halfstep as hs

    model = model_of(reward_forward, body=gpt2(), value_head=nn.Linear(32, 1))
    model.body.lm_head = nn.Identity()
    return case(
        model,
        lambda k: (progressions(k, 4, 12), progressions(k + 50, 4, 12)),
        pairwise,
        policy=hs.Policy.of("O3", dtype="fp16"),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-4, eps=1e-4 if healthy else 1e-8, foreach=False),
    )


# ------------------------------------------------------------------ training has run away


@story(
    source="karpathy/nanoGPT#136",
    cause="divergence",
    kind="overflow",
    op="matmul",
    module="transformer.h.0.attn",
    step=11,
    place="modeling_gpt2.py: eager_attention_forward: torch.matmul(query, key",
    says=(r"learning rate", r"loss (rose|grew|went)|diverg"),
    never=(r"cure, verified",),
    seed=209,
)
def nano_gpt_learning_rate(healthy: bool) -> Case:
    """GPT-2 from scratch in fp16: the loss rises, is NaN after some steps, and a lower learning rate cures it."""
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def warm_up(step: int) -> None:
        optimizer.param_groups[0]["lr"] = min(step / 10, 1.0) * (1e-3 if healthy else 1.0)

    return case(model, lambda k: (progressions(k, 4, 12),), next_token, optimizer=optimizer, before=warm_up)


def word_model_forward(self: Any, ids: Tensor) -> Any:
    hidden, _ = self.rnn(self.encoder(ids))  # FAULT word_language_model
    return self.decoder(hidden)


def shifted(model: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@story(
    source="pytorch/examples#223",
    cause="divergence",
    kind="overflow",
    op="rnn_relu",
    module="rnn",
    step=8,
    says=(r"learning rate", r"loss (rose|grew|went)|diverg"),
    never=(r"cure, verified", r"fp32=\["),
    seed=210,
)
def word_language_model(healthy: bool) -> Case:
    """The word-level language model of PyTorch's examples with RNN_RELU in fp32: at its default rate of 20, NaN."""
    model = model_of(
        word_model_forward,
        encoder=nn.Embedding(64, 24),
        rnn=nn.RNN(24, 24, 2, nonlinearity="relu", batch_first=True),
        decoder=nn.Linear(24, 64),
    )
    return case(
        model,
        lambda k: (progressions(k, 8, 35),),
        shifted,
        policy=FULL,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1 if healthy else 20.0),
    )


class Adapter(nn.Module):
    """A linear layer that is frozen, and a product of two small ones beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4, alpha: float = 8.0) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )
        self.scaling = alpha / rank
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + self.up(self.down(x)) * self.scaling  # FAULT lora_learning_rate


@story(
    source="ssbuild/chatglm_finetuning#28",
    cause="divergence",
    kind="overflow",
    op="mul",
    module="model.layers.1.self_attn.o_proj",
    step=4,
    says=(r"learning rate", r"loss (rose|grew|went)|diverg"),
    never=(r"cure, verified",),
    seed=211,
)
def lora_learning_rate(healthy: bool) -> Case:
    """LoRA on each linear layer of a small Llama: at a rate 250 times too high the loss rises and becomes NaN."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config).requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, Adapter(getattr(layer.self_attn, name)))
    model.lm_head = Adapter(model.lm_head)
    trained = [p for p in model.parameters() if p.requires_grad]
    return case(
        model,
        lambda k: (progressions(k, 4, 12),),
        next_token,
        optimizer=torch.optim.AdamW(trained, lr=4e-3 if healthy else 1.0, weight_decay=0.0),
    )


# ------------------------------------------------------------------ the batch


def distillation(model: Any, ids: Tensor, teacher: Tensor, answer: Tensor) -> Tensor:
    student = model(input_ids=ids, use_cache=False).logits
    each = (teacher.softmax(-1) * F.log_softmax(student.float(), -1)).sum(-1)
    mask = answer.float()
    return -(each * mask).sum() / mask.sum()  # FAULT distillation_without_answers


@story(
    source="microsoft/LMOps#38",
    cause="data",
    kind="invalid",
    op="div",
    step=7,
    says=(r"mask|answer|batch", r"\bdiv\b|divi"),
    never=(r"cure, verified", r"learning rate"),
    seed=212,
)
def distillation_without_answers(healthy: bool) -> Case:
    """Distillation of GPT-2: the tokenizer cuts long prompts, and in one batch no token of an answer is left."""

    def batch(step: int) -> tuple[Any, ...]:
        length = 12 if step == 7 and not healthy else 8
        answer = torch.arange(12) >= length
        return progressions(step, 4, 12), normal(step, 4, 12, 64), answer.expand(4, 12)

    return case(gpt2(), batch, distillation, policy=BF16)


def supervised(model: Any, ids: Tensor, targets: Tensor) -> Any:
    return model(input_ids=ids, labels=targets, use_cache=False).loss


@story(
    source="nvidia-cosmos/cosmos-rl#155",
    cause="data",
    kind="invalid",
    op="cross_entropy",
    place="loss_utils.py: fixed_cross_entropy: nn.functional.cross_entropy(",
    step=5,
    says=(r"label|target", r"ignore|-100"),
    never=(r"cure, verified", r"learning rate"),
    seed=213,
)
def answers_cut_off(healthy: bool) -> Case:
    """Supervised fine-tuning of a small Llama: in one batch each label is -100, and the mean over no token is NaN."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
    )

    def batch(step: int) -> tuple[Any, ...]:
        ids = progressions(step, 4, 12)
        targets = ids.clone()
        targets[:, : 12 if step == 5 and not healthy else 6] = -100
        return ids, targets

    return case(LlamaForCausalLM(config), batch, supervised)


def encoder_forward(self: Any, ids: Tensor, padding: Tensor) -> Any:
    h = self.embed(ids)
    attended, _ = self.attention(h, h, h, key_padding_mask=padding)  # FAULT empty_document
    return self.head(self.norm(h + attended).mean(1))


@story(
    source="pytorch/pytorch#24816",
    cause="data",
    kind="invalid",
    op="softmax",
    module="attention",
    step=8,
    says=(r"mask", r"row|sample|key|padding"),
    never=(r"cure, verified", r"learning rate"),
    seed=214,
    also=("multi_head_attention_forward",),
)
def empty_document(healthy: bool) -> Case:
    """nn.MultiheadAttention over documents one of which is empty: each of its keys is padding, its softmax is NaN."""
    model = model_of(
        encoder_forward,
        embed=nn.Embedding(64, 32),
        attention=nn.MultiheadAttention(32, 2, batch_first=True),
        norm=nn.LayerNorm(32),
        head=nn.Linear(32, 4),
    )

    def batch(step: int) -> tuple[Any, ...]:
        lengths = torch.tensor([[12], [7], [1 if healthy or step != 8 else 0], [9]])
        return tokens(step, (4, 12), 64), torch.arange(12) >= lengths, labels(step, 4)

    return case(model, batch, lambda m, ids, padding, y: F.cross_entropy(m(ids, padding), y))


# ------------------------------------------------------------------ the formula


def ranking(healthy: bool) -> Any:
    def loss_fn(model: Any, chosen: Tensor, rejected: Tensor) -> Tensor:
        margin = model(chosen) - model(rejected)
        if healthy:
            return -F.logsigmoid(margin).mean()
        return -torch.log(torch.sigmoid(margin)).mean()  # FAULT critic_log_sigmoid

    return loss_fn


@story(
    source="deepspeedai/DeepSpeedExamples#501",
    cause="model",
    kind="invalid",
    op="log",
    step=6,
    says=(r"logsigmoid", r"\blog\b"),
    never=(r"cure, verified",),
    seed=215,
)
def critic_log_sigmoid(healthy: bool) -> Case:
    """The critic of RLHF: for a margin of -140 sigmoid is 0 in each format, and its logarithm -inf."""
    model = model_of(reward_forward, body=gpt2(), value_head=nn.Linear(32, 1))
    model.body.lm_head = nn.Identity()
    with torch.no_grad():
        outlier(model.body.transformer.wte.weight)
        model.value_head.weight[0, 0] = 40.0

    def batch(step: int) -> tuple[Any, ...]:
        chosen, rejected = progressions(step, 4, 12), progressions(step + 50, 4, 12)
        if step == 6:
            rejected[2, -1] = RARE
        return chosen, rejected

    return case(model, batch, ranking(healthy), policy=BF16, lr=1e-4)


def odds_ratio(healthy: bool) -> Any:
    def loss_fn(model: Any, chosen: Tensor, rejected: Tensor) -> Tensor:
        good, bad = (log_probabilities(model, ids).mean(-1) for ids in (chosen, rejected))
        if healthy:
            good, bad = good.clamp(max=-1e-4), bad.clamp(max=-1e-4)
        odds = (good - bad) - (torch.log(1 - good.exp()) - torch.log(1 - bad.exp()))  # FAULT orpo_certain_answer
        return -good.mean() - 0.1 * F.logsigmoid(odds).mean()

    return loss_fn


@story(
    source="hpcaitech/ColossalAI#6407",
    cause="model",
    kind="invalid",
    op="log",
    step=5,
    says=(r"\blog\b", r"log1p|expm1|clamp|eps|1 - "),
    never=(r"learning rate",),
    seed=216,
)
def orpo_certain_answer(healthy: bool) -> Case:
    """ORPO: the model is certain of an answer, so that 1 - p is 0 and the odds are infinite; the loss stays finite."""
    model = gpt2(tie_word_embeddings=False)
    with torch.no_grad():
        outlier(model.transformer.wte.weight)
        model.lm_head.weight[RARE, 0] = 20.0

    def batch(step: int) -> tuple[Any, ...]:
        chosen, rejected = progressions(step, 4, 12), progressions(step + 50, 4, 12)
        if step == 5:
            chosen[1] = RARE
        return chosen, rejected

    return case(model, batch, odds_ratio(healthy), policy=BF16, lr=1e-4)


def group_relative(model: Any, ids: Tensor, rewards: Tensor) -> Tensor:
    spread = rewards.std(1, keepdim=True)  # FAULT grpo_single_generation
    advantage = (rewards - rewards.mean(1, keepdim=True)) / (spread + 1e-4)
    return -(log_probabilities(model, ids).mean(-1) * advantage.flatten()).mean()


@story(
    source="axolotl-ai-cloud/axolotl#3353",
    cause="model",
    kind="invalid",
    op="std",
    step=1,
    says=(r"\bstd\b",),
    never=(r"cure, verified", r"learning rate"),
    seed=217,
)
def grpo_single_generation(healthy: bool) -> Case:
    """GRPO with one generation for each prompt: the unbiased standard deviation of one reward is NaN."""
    group = (1, 4) if healthy else (4, 1)
    return case(gpt2(), lambda k: (progressions(k, 4, 12), normal(k, *group).sigmoid()), group_relative, lr=1e-5)


def gated_linear_attention(self: Any, h: Tensor) -> Any:
    query, key, value, gate = self.qkvg(h).chunk(4, -1)
    decay = F.logsigmoid(gate.float() + self.bias).cumsum(1).clamp(min=self.floor)
    scores = (query * decay.exp()) @ (key * torch.exp(-decay)).transpose(1, 2)  # FAULT strong_decay
    return self.out(scores.tril() @ value)


def gla_layer(floor: float) -> Any:
    """Return a layer whose accumulated logarithm of a decay is at least `floor`."""
    parts = {"qkvg": nn.Linear(32, 128), "out": nn.Linear(32, 32), "bias": nn.Parameter(torch.full((32,), 3.0))}
    return model_of(gated_linear_attention, floor=floor, **parts)


def gla_forward(self: Any, ids: Tensor) -> Any:
    h = self.embed(ids)
    for norm, mix in zip(self.norms, self.layers, strict=True):
        h = h + mix(norm(h))
    return self.head(h)


@story(
    source="fla-org/flash-linear-attention#77",
    cause="model",
    kind="overflow",
    op="exp",
    module="layers.1",
    step=4,
    says=(r"\bexp\b", r"layers\.1"),
    never=(r"learning rate",),
    seed=218,
)
def strong_decay(healthy: bool) -> Case:
    """Gated linear attention by chunks: where a gate closes, one over its accumulated decay is infinite in fp32 too."""
    model = model_of(
        gla_forward,
        embed=nn.Embedding(64, 32),
        norms=nn.ModuleList(nn.LayerNorm(32) for _ in range(2)),
        layers=nn.ModuleList(gla_layer(-60.0 if healthy else -float("inf")) for _ in range(2)),
        head=nn.Linear(32, 64),
    )
    with torch.no_grad():
        outlier(model.embed.weight)
        model.layers[1].qkvg.weight[100, 0] = -8.0

    def batch(step: int) -> tuple[Any, ...]:
        ids = progressions(step, 4, 16)
        if step >= 4:
            ids[2, 9:] = RARE
        return (ids,)

    return case(model, batch, shifted, policy=BF16)


# ------------------------------------------------------------------ the loss scale


@story(
    source="unslothai/unsloth-zoo#866",
    cause="scale",
    kind="scale_too_high",
    phase="backward",
    step=1,
    cures=("scale: 128", "scale: dynamic"),
    says=(r"scale",),
    never=(r"learning rate",),
    seed=219,
)
def experts_backward(healthy: bool) -> Case:
    """Qwen3-MoE in fp16: activations and loss are small, but scaled gradients overflow on the very first step."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        model.model.norm.weight.fill_(16.0)  # as trained models have it
    scale = 128.0 if healthy else 2.0**16
    return case(model, lambda k: (progressions(k, 4, 12),), next_token, policy=MIXED.replace(scale=scale))
