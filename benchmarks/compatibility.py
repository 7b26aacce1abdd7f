"""Small models of transformers, timm, diffusers and PyTorch Geometric, each trained a step plain and with Encke.

For every model: is the gradient bit for bit that of plain training at error bound 0, and what are ratio and gradient
error with the default policy? Weights are random; nothing is downloaded. Models that do not build or do not train
without Encke are counted, not judged.

python3 benchmarks/compatibility.py [LIBRARY ...] [--only NAME] [--csv FILE] [--page docs/compatibility.md]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import io
import multiprocessing
import os
import statistics
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tables import TODAY  # noqa: E402

import encke  # noqa: E402
from encke.codecs import ErrorBounded  # noqa: E402
from encke.policies import Fixed  # noqa: E402
from encke.tools.provenance import version, write_csv  # noqa: E402
from encke.train.models.vision import torchvision_models  # noqa: E402

LIBRARIES = ("transformers", "timm", "diffusers", "torch_geometric")
LARGEST = 40_000_000
"""Parameters of a model that is still called small."""
WIDTH = 120
"""Characters in a line of the page."""
SECONDS = 180
"""Time that a model may take plain, and again with Encke."""


class Case(NamedTuple):
    """A model and a function that computes a loss with it."""

    model: nn.Module
    loss: Callable[[nn.Module], Tensor]


# -- models ------------------------------------------------------------------------------------------------------------

# Settings of configurations of transformers, by the names that the families use.
SMALL: dict[str, Any] = (
    dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "encoder_hidden_size", "d_embed"), 64)
    | dict.fromkeys(("word_embed_proj_dim", "embedding_size", "emb_dim", "attention_hidden_size", "width"), 64)
    | dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "d_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 128)
    | dict.fromkeys(("ffn_hidden_size", "n_inner", "hidden_dim", "feed_forward_hidden_size", "block_ff_dim"), 128)
    | dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 64)
    | dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2)
    | dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "num_blocks"), 2)
    | dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4)
    | dict.fromkeys(("decoder_attention_heads",), 4)
    | dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv"), 2)
    | dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "qk_nope_head_dim", "kv_lora_rank", "q_lora_rank"), 16)
    | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
    | dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2)
    | {"vocab_size": 256, "max_position_embeddings": 128, "n_positions": 128, "n_ctx": 128, "image_size": 64}
    | {"qk_rope_head_dim": 8, "type_vocab_size": 2, "layer_types": None, "n_group": 1, "topk_group": 1}
    | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
)
TASKS = {
    "MODEL_FOR_CAUSAL_LM_MAPPING": "tokens",
    "MODEL_FOR_MASKED_LM_MAPPING": "tokens",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING": "tokens",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING": "images",
}


def transformers_models() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Yield the language models and image classifiers that transformers' own tables list."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    seen = set()
    for mapping, data in TASKS.items():
        for config_class, kinds in getattr(auto, mapping).items():
            kind = kinds[0] if isinstance(kinds, tuple) else kinds
            if kind.__name__ not in seen:
                seen.add(kind.__name__)
                yield kind.__name__, lambda c=config_class, k=kind, d=data: transformers_case(c, k, d)


def transformers_case(config_class: Any, kind: Any, data: str) -> Case:
    """Build a model of transformers with a small configuration."""
    known = config_class().to_dict()
    if not known.get("decoder_start_token_id", True):
        known["decoder_start_token_id"] = 1
    config = config_class(**{key: value for key, value in SMALL.items() if key in known})
    config.decoder_start_token_id = 1
    with torch.device("meta"):
        count = sum(p.numel() for p in kind(config).parameters())
    if count > LARGEST:
        raise ValueError(f"{count:,} parameters")
    model = kind(config)
    if data == "images":
        size = getattr(config, "image_size", 64)
        side = size[0] if isinstance(size, list | tuple) else size
        inputs = {"pixel_values": torch.randn(4, getattr(config, "num_channels", 3), side, side)}
        return Case(model, lambda called: called(**inputs, labels=torch.arange(4) % config.num_labels).loss)
    tokens = torch.randint(3, 250, (4, 48))
    return Case(model, lambda called: called(input_ids=tokens, labels=tokens).loss)


TIMM = """
botnet26t_256 cait_xxs24_224 coat_lite_tiny coatnet_pico_rw_224 convit_tiny convmixer_768_32 convnext_atto
convnextv2_atto crossvit_tiny_240 cs3darknet_focus_s cspresnet50 darknet17 davit_tiny deit_tiny_patch16_224
densenet121 dla34 dm_nfnet_f0 dpn48b eca_nfnet_l0 edgenext_xx_small efficientformer_l1 efficientformerv2_s0
efficientnet_b0 efficientnet_lite0 efficientnetv2_rw_t efficientvit_b0 efficientvit_m0 ese_vovnet19b_slim_dw
eva02_tiny_patch14_224 fastvit_t8 fbnetc_100 focalnet_tiny_srf gcvit_xxtiny gernet_s ghostnet_050 gmlp_ti16_224
halonet26t hardcorenas_a hgnet_tiny hrnet_w18_small inception_next_atto lambda_resnet26t lcnet_050 legacy_seresnet18
levit_128s mambaout_femto maxvit_rmlp_pico_rw_256 mixer_s32_224 mixnet_s mnasnet_small mobilenet_edgetpu_v2_xs
mobilenetv2_050 mobilenetv3_small_050 mobilenetv4_conv_small_050 mobileone_s0 mobilevit_xxs mobilevitv2_050
mvitv2_tiny nest_tiny nf_regnet_b0 nf_resnet50 nfnet_l0 pit_ti_224 poolformer_s12 pvt_v2_b0 regnetx_002 regnety_002
regnetz_b16 repghostnet_050 repvgg_a0 repvit_m0_9 res2net50_14w_8s resmlp_12_224 resnest14d resnet10t resnet18
resnet26t resnetv2_50 resnext26ts rexnet_100 selecsls42 semnasnet_050 sequencer2d_s seresnext26d_32x4d shvit_s1
skresnet18 spnasnet_100 starnet_s050 swiftformer_xs swin_tiny_patch4_window7_224 swinv2_cr_tiny_ns_224 tf_mixnet_s
tiny_vit_5m_224 tinynet_e tnt_s_patch16_224 twins_pcpvt_small vgg11_bn visformer_tiny vit_tiny_patch16_224 volo_d1_224
xception41 xcit_nano_12_p16_224
"""


def timm_models() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Yield a small model of most families of timm, at 64 pixels where the family allows it."""
    timm = importlib.import_module("timm")
    own = {name for name in timm.list_models("test_*")}
    for name in sorted(own | set(TIMM.split())):
        yield name, lambda n=name: timm_case(timm, n)


def timm_case(timm: Any, name: str) -> Case:
    """Build a model of timm, and images of the smallest size that it takes."""
    model, side = None, 64
    with contextlib.suppress(TypeError, AssertionError, ValueError):
        model = timm.create_model(name, num_classes=10, img_size=side)
    if model is None:
        model = timm.create_model(name, num_classes=10)
        fixed = model.default_cfg.get("fixed_input_size", False)
        side = model.default_cfg["input_size"][-1] if fixed else 96
    images = torch.randn(4, model.default_cfg["input_size"][0], side, side)
    return Case(model, lambda called: nn.functional.cross_entropy(called(images), torch.arange(4)))


def diffusers_models() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Yield denoising networks and autoencoders of diffusers."""
    blocks = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    cross = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "cross_attention_dim": 32}
    cross |= {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "attention_head_dim": 8}
    ends = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    heads = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16}
    square, words, time = torch.randn(2, 4, 32, 32), torch.randn(2, 8, 32), torch.tensor([3, 7])
    cases: dict[str, tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]] = {
        "UNet2DModel": (
            {"in_channels": 4, "out_channels": 4, "down_block_types": down, "up_block_types": up, **blocks},
            (square, time), {},
        ),
        "UNet2DConditionModel": ({**blocks, **cross}, (square, time, words), {}),
        "UNet1DModel": (
            {"in_channels": 4, "out_channels": 4, "block_out_channels": (32, 64), "extra_in_channels": 0,
             "down_block_types": ("DownBlock1D", "AttnDownBlock1D"), "up_block_types": ("AttnUpBlock1D", "UpBlock1D"),
             "time_embedding_type": "positional", "use_timestep_embedding": False},
            (torch.randn(2, 4, 64), time), {},
        ),
        "AutoencoderKL": ({"in_channels": 4, "out_channels": 4, **ends, **blocks}, (square,), {}),
        "VQModel": ({"in_channels": 4, "out_channels": 4, **ends, **blocks}, (square,), {}),
        "AutoencoderTiny": (
            {"in_channels": 4, "out_channels": 4, "encoder_block_out_channels": (32, 32),
             "decoder_block_out_channels": (32, 32), "num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)},
            (square,), {},
        ),
        "DiTTransformer2DModel": (
            {"in_channels": 4, "out_channels": 4, "sample_size": 32, "norm_num_groups": 8, "num_embeds_ada_norm": 10,
             **heads},
            (square, time), {"class_labels": torch.tensor([1, 2])},
        ),
        "PixArtTransformer2DModel": (
            {"in_channels": 4, "out_channels": 4, "sample_size": 32, "caption_channels": 32, "cross_attention_dim": 32,
             "norm_num_groups": 8, **heads},
            (square, words, time), {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
        ),
        "SD3Transformer2DModel": (
            {"in_channels": 4, "out_channels": 4, "sample_size": 32, "joint_attention_dim": 32,
             "caption_projection_dim": 32, "pooled_projection_dim": 32, **heads},
            (square, words, torch.randn(2, 32), time), {},
        ),
        "FluxTransformer2DModel": (
            {"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2,
             "attention_head_dim": 16, "joint_attention_dim": 32, "pooled_projection_dim": 32,
             "axes_dims_rope": (4, 4, 8)},
            (torch.randn(2, 64, 4),),
            {"encoder_hidden_states": words, "pooled_projections": torch.randn(2, 32), "timestep": time,
             "img_ids": torch.zeros(64, 3), "txt_ids": torch.zeros(8, 3)},
        ),
    }  # fmt: skip
    diffusers = importlib.import_module("diffusers")
    for name, (settings, args, kwargs) in cases.items():
        yield (
            name,
            lambda n=name, s=settings, a=args, k=kwargs: Case(
                getattr(diffusers, n)(**s), lambda called: (called(*a, **k).sample - 1).square().mean()
            ),
        )


GRAPHS: dict[str, dict[str, Any]] = {
    "GCNConv": {},
    "GATConv": {"heads": 2, "concat": False},
    "GATv2Conv": {"heads": 2, "concat": False},
    "TransformerConv": {"heads": 2, "concat": False},
    "SAGEConv": {},
    "SAGEConv max": {"aggr": "max"},
    "SAGEConv softmax": {"aggr": "softmax"},
    "GraphConv": {},
    "GraphConv max": {"aggr": "max"},
    "ChebConv": {"K": 3},
    "ARMAConv": {},
    "TAGConv": {},
    "SGConv": {"K": 2},
    "LEConv": {},
    "ClusterGCNConv": {},
    "ResGatedGraphConv": {},
    "MFConv": {},
    "FeaStConv": {"heads": 2},
    "SuperGATConv": {"heads": 2, "concat": False},
    "GENConv": {},
    "HypergraphConv": {},
    "EdgeConv max": {},
    "GINConv": {},
}


def torch_geometric_models() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Yield networks of two graph convolutions."""
    layers = importlib.import_module("torch_geometric.nn")
    edges = torch.randint(0, 200, (2, 1000), generator=torch.Generator().manual_seed(0))
    nodes = torch.randn(200, 32, generator=torch.Generator().manual_seed(0))

    def mlp(inputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 32))

    def layer(name: str, settings: dict[str, Any]) -> nn.Module:
        kind = getattr(layers, name.split()[0])
        if name.startswith("EdgeConv"):
            return kind(mlp(64), aggr="max")
        return kind(mlp(32)) if name == "GINConv" else kind(32, 32, **settings)

    for name, settings in GRAPHS.items():
        yield (
            name,
            lambda n=name, s=settings: Case(
                nn.ModuleList([layer(n, s), layer(n, s)]),
                lambda called: nn.functional.cross_entropy(
                    called[1](called[0](nodes, edges).relu(), edges), torch.arange(200) % 32
                ),
            ),
        )


# -- measurements ------------------------------------------------------------------------------------------------------


def gradients(case: Case, policy: Any, steps: int = 1) -> tuple[Tensor, Any]:
    """Return the gradient of the last of some equal steps, and Encke's report."""
    model = copy.deepcopy(case.model).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    handle = encke.attach(model, policy, optimizer, min_bytes=1) if policy is not None else None
    for _ in range(steps):
        torch.manual_seed(1)  # the same dropout
        optimizer.zero_grad()
        case.loss(model).backward()
        optimizer.step()
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    report = handle.report() if handle is not None else None
    if handle is not None:
        handle.detach()
    return found, report


def judge(build: Callable[[], Case]) -> Iterator[dict[str, Any]]:
    """Compare a model's gradients with plain ones.

    Yields first the number of parameters, or under the key `left_out` why plain training is no reference; then the
    verdict.
    """
    torch.manual_seed(0)
    try:
        case = build()
        plain, again = gradients(case, None)[0], gradients(case, None)[0]
    except Exception as error:  # a model that fails without Encke says nothing about Encke
        yield {"left_out": f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"}
        return
    if not plain.isfinite().all() or not torch.equal(plain, again):
        yield {"left_out": "plain gradients are not finite, or differ from run to run"}
        return
    yield {"parameters": sum(p.numel() for p in case.model.parameters())}
    try:
        exact, _ = gradients(case, Fixed(ErrorBounded(0)))
        lossy, report = gradients(case, "default", steps=2)
    except Exception as error:
        yield {"verdict": f"error: {type(error).__name__}: {' '.join(str(error).split())[:200]}"}
        return
    row: dict[str, Any] = {"bound_0_equal": torch.equal(exact, plain), "ratio": round(report.ratio, 2)}
    row["gradient_error"] = round(float((lossy - plain).norm() / plain.norm()), 4)
    if not lossy.isfinite().all():
        yield row | {"verdict": "not finite with the default policy"}
    else:
        yield row | {"verdict": "works" if row["bound_0_equal"] else "differs at bound 0"}


def models(library: str) -> list[tuple[str, Callable[[], Case]]]:
    """Return names of a library's models, and functions that build them."""
    torchvision_models()  # the libraries import torchvision, which is made to fit the installed torch
    return list(globals()[f"{library}_models"]())


def work(library: str, names: Connection) -> None:
    """Judge the models whose names arrive, in a process of its own."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // 2, 1))
    found = dict(models(library))
    names.send({})
    while (name := names.recv()) is not None:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            for part in judge(found[name]):
                names.send(part)


class Worker:
    """Process that judges models of a library."""

    def __init__(self, library: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(library, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.pipe.recv()

    def answer(self) -> dict[str, Any]:
        """Return the next part of the answer, or how the process failed to give it, under the key `failed`."""
        try:
            return self.pipe.recv() if self.pipe.poll(SECONDS) else {"failed": f"took more than {SECONDS} s"}
        except EOFError:
            return {"failed": "the process died"}

    def judge(self, name: str) -> dict[str, Any]:
        """Return what is found out about a model."""
        self.pipe.send(name)
        row = self.answer()
        if "failed" in row:
            return {"left_out": row["failed"]}
        if "left_out" not in row:
            row |= self.answer()
            if "failed" in row:
                row["verdict"] = row.pop("failed")
        return row

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()


def judge_all(library: str, only: str | None) -> Iterator[dict[str, Any]]:
    """Judge all models of a library. A process that dies or hangs is replaced, and its model says so."""
    worker: Worker | None = None
    for name, _ in models(library):
        if only is not None and only not in name:
            continue
        worker = worker or Worker(library)
        row = worker.judge(name)
        if str(row.get("left_out", row.get("verdict"))).startswith(("took more", "the process died")):
            worker.end()
            worker = None
        yield {"library": library, "model": name, **row}
    if worker is not None:
        worker.end()


COLUMNS = ("library", "model", "parameters", "bound_0_equal", "ratio", "gradient_error", "verdict")


def page(rows: list[dict[str, Any]], left_out: dict[str, int]) -> str:
    """Return the page with the summary and one table for each library."""
    judged = [row for row in rows if "verdict" in row]
    works = [row for row in judged if row["verdict"] == "works"]
    names = {"torch_geometric": "PyTorch Geometric"}
    lines = [
        "# Compatibility",
        "",
        "<!-- written by: python3 benchmarks/compatibility.py --page docs/compatibility.md -->",
        "",
        f"<!-- figures: compatibility_cpu.csv; {TODAY} -->",
        "",
        textwrap.fill(
            f"{len(judged)} small models with random weights, one training step on the CPU. {len(works)} of them work: "
            "at error bound 0 the gradient is that of plain training bit for bit, and with the default policy it is "
            "finite. Every saved tensor is compressed (`min_bytes=1`), however small. *Ratio* is what autograd saves "
            "over what is kept; *error* is that of the whole gradient, |g - plain| / |plain|, in the second step on "
            f"the same batch. Trained models and larger batches have other errors. The policy is {TODAY}.",
            WIDTH,
        ),
        "",
        "| library | version | models | work | median ratio | median error | largest error |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for library in dict.fromkeys(row["library"] for row in judged):
        some = [row for row in judged if row["library"] == library and "ratio" in row]
        errors = [row["gradient_error"] for row in some]
        good = sum(row["verdict"] == "works" for row in some)
        lines.append(
            f"| {names.get(library, library)} | {version(library) or ''} | {len(some)} | {good} "
            f"| {statistics.median(row['ratio'] for row in some):.1f} | {statistics.median(errors):.2f} "
            f"| {max(errors):.2f} |"
        )
    counts = ", ".join(f"{names.get(key, key)} {count}" for key, count in left_out.items())
    words = f"Models that do not build or train in this small form without Encke are not counted: {counts}."
    lines += ["", "<!-- end -->", "", textwrap.fill(words, WIDTH)]
    for library in dict.fromkeys(row["library"] for row in judged):
        lines += [
            "",
            f"## {names.get(library, library)}",
            "",
            f"<!-- table: compatibility-{library}; {TODAY} -->",
            "",
            f"Policy: {TODAY}.",
            "",
            "| model | ratio | error | verdict |",
        ]
        lines += ["| --- | --- | --- | --- |"]
        for row in (row for row in judged if row["library"] == library):
            figures = f"{row['ratio']:.1f} | {row['gradient_error']:.2f}" if "ratio" in row else " | "
            lines.append(f"| {row['model']} | {figures} | {row['verdict']} |")
        lines += ["", "<!-- end -->"]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="*", default=list(LIBRARIES), help=", ".join(LIBRARIES))
    parser.add_argument("--only", help="models whose name contains this")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    left_out = dict.fromkeys(args.libraries, 0)
    for library in args.libraries:
        for row in judge_all(library, args.only):
            rows.append(row)
            left_out[library] += "left_out" in row
            figures = f"ratio {row['ratio']}, error {row['gradient_error']}" if "ratio" in row else ""
            print(library, row["model"], row.get("verdict") or f"left out: {row['left_out']}", figures, flush=True)
    judged = [row for row in rows if "verdict" in row]
    failed = [row for row in judged if row["verdict"] != "works"]
    print(f"{len(judged)} models, {len(failed)} do not work, {sum(left_out.values())} left out")
    if args.csv:
        write_csv(args.csv, [{column: row.get(column, "") for column in COLUMNS} for row in judged])
    if args.page:
        args.page.write_text(page(rows, left_out))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
