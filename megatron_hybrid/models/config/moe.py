"""Mixture of experts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from megatron_hybrid.models.config.field_group import Epsilon, FieldGroup, LayerFields
from megatron_hybrid.utils.validation import Range

AUXILIARY_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
"""Losses in `moe_router_load_balancing_type`, each with its `moe_aux_loss_coeff`."""

_UNSUPPORTED_BALANCING = {
    "quantile_balancing": "which moves a bias that checkpoints and serving do not have here. "
    "Balance the experts by moe_router_enable_expert_bias, whose bias they have.",
    "sinkhorn": "which chooses other experts in training than in serving. Balance them by "
    "'aux_loss', or by moe_router_enable_expert_bias.",
}


@dataclass
class MoEFields(LayerFields):
    """Fields of a layer with experts."""

    if TYPE_CHECKING:
        moe_expert_capacity_factor: float | None = None
        moe_router_load_balancing_type: str | list[str] = "aux_loss"
        moe_aux_loss_coeff: float | list[float] = 0.0
        moe_z_loss_coeff: float | None = None

    num_moe_experts: int | None = None
    """Experts of a layer."""

    moe_ffn_hidden_size: int | None = None
    """Inner width of an expert; None means ffn_hidden_size."""

    moe_shared_expert_intermediate_size: int | None = None
    """Inner width of the shared expert, which takes every token; None means that there is none."""

    moe_shared_expert_gate: bool = False
    """Multiply the shared expert's output by the sigmoid of a projection of its input."""

    moe_shared_expert_clamp_value: Annotated[float, Range(ge=0)] | None = None
    """Its activation_func_clamp_value; 0 means none, and None that of the experts."""

    moe_latent_size: Annotated[int, Range(ge=1)] | None = None
    """Width of the latent that experts run in, between two projections; None means hidden_size."""

    moe_apply_probs_on_input: bool = False
    """Multiply an expert's input by its routing weight, not its output."""

    moe_router_topk: Annotated[int, Range(ge=1)] = 2
    """Experts of a token."""

    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Function from the router's logits to scores."""

    moe_router_pre_softmax: bool = False
    """Softmax scores of all experts are the weights of the chosen ones; else these sum to 1."""

    moe_router_enable_expert_bias: bool = False
    """A bias per expert that affects the top-k choice, not the weights."""

    moe_router_num_groups: Annotated[int, Range(ge=1)] | None = None
    """Groups of experts, of which moe_router_group_topk are chosen first; None means no groups."""

    moe_router_group_topk: Annotated[int, Range(ge=1)] | None = None
    """Groups that a token's experts are chosen from; None means all experts."""

    moe_router_topk_scaling_factor: Annotated[float, Range(gt=0)] | None = None
    """Factor of the weights of the chosen experts."""

    moe_router_topk_epsilon: Epsilon = 1e-20
    """Added to the sum of the chosen experts' scores before they are divided by it, where these are
    sigmoids or a bias selects."""

    def check(self) -> None:
        if self.num_moe_experts is None:
            raise ValueError(
                f"num_moe_experts is None, but layer_pattern {self.layer_pattern!r} has layers "
                "with a mixture of experts. Set it, moe_router_topk and moe_ffn_hidden_size."
            )
        self.check_routing()
        sizes = ["moe_ffn_hidden_size"]
        if self.moe_shared_expert_intermediate_size is not None:
            sizes.append("moe_shared_expert_intermediate_size")
        elif self.moe_shared_expert_gate:
            raise ValueError(
                "moe_shared_expert_gate=True gates a shared expert, but there is none: "
                "moe_shared_expert_intermediate_size is None. Set it, or leave out the gate."
            )
        self._require_positive(*sizes)
        self._require_divisible("moe_ffn_hidden_size", parallel_size="expert_tensor_parallel_size")
        self._require_divisible(*sizes[1:])
        self._require_divisible("num_moe_experts", parallel_size="expert_model_parallel_size")
        defaults = {"mlp_gate_multiplier": 1.0, "activation_sparsity": 0.0}
        for name, default in {**defaults, "mlp_output_multiplier": 1.0}.items():
            if (value := getattr(self, name)) != default:
                raise ValueError(
                    f"{name} is {value}, which experts do not have. Leave it at {default}, or set "
                    "it by layer_overrides for the symbol -."
                )

    def check_routing(self) -> None:
        """See `FieldGroup.check`. This runs before megatron-core's own checks of routing, which are
        assertions."""
        self._require_positive("num_moe_experts")
        experts, topk = self.num_moe_experts, self.moe_router_topk
        if topk > experts:
            raise ValueError(
                f"moe_router_topk is {topk}, but num_moe_experts is {experts}. "
                "A token cannot go to more experts than there are."
            )
        self._check_losses()
        softmax = self.moe_router_score_function == "softmax"
        if softmax and topk == 1 and not self.moe_router_pre_softmax:
            raise ValueError(
                "moe_router_topk=1 with a softmax over the one chosen expert weighs it 1 whatever "
                "the router says. Set moe_router_pre_softmax=True or use 'sigmoid' scores."
            )
        if self.moe_apply_probs_on_input and topk != 1:
            raise ValueError(
                f"moe_apply_probs_on_input=True needs moe_router_topk=1, but it is {topk}."
            )
        # None, as far as core has not filled it in: that of all else.
        expert_tp = self.expert_tensor_parallel_size or self.tensor_model_parallel_size
        if self.add_bias_linear and expert_tp > 1:
            raise ValueError(
                "add_bias_linear=True with experts needs whole experts, as in megatron-core, but "
                f"expert_tensor_parallel_size is {expert_tp}. Use 1, and spread the experts by "
                "expert_model_parallel_size."
            )
        groups, chosen = self.moe_router_num_groups, self.moe_router_group_topk
        if (groups is None) != (chosen is None):
            raise ValueError(
                f"moe_router_num_groups is {groups} and moe_router_group_topk is {chosen}; "
                "set both, or none to choose among all experts."
            )
        if groups is None:
            return
        per_group, rest = divmod(topk, chosen)
        if experts % groups or chosen > groups or rest or per_group > experts // groups:
            raise ValueError(
                f"moe_router_num_groups={groups} and moe_router_group_topk={chosen} do not fit "
                f"num_moe_experts={experts} and moe_router_topk={topk}: groups must divide the "
                "experts evenly, and each chosen group must give an equal share of the top-k."
            )

    def _check_losses(self) -> None:
        """Raise ValueError unless the losses of the router and their coefficients are legal."""
        kinds, factors = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        lists = [isinstance(value, list) for value in (kinds, factors)]
        if lists[0] != lists[1] or (lists[0] and len(kinds) != len(factors)):
            raise ValueError(
                f"moe_router_load_balancing_type is {kinds!r} and moe_aux_loss_coeff is "
                f"{factors!r}. Give one loss and one coefficient, or a list of each, of the same "
                "length."
            )
        kinds = kinds if lists[0] else [kinds]
        names = (*AUXILIARY_LOSSES, "none")
        for kind in kinds:
            if kind in _UNSUPPORTED_BALANCING:
                raise ValueError(
                    f"moe_router_load_balancing_type is {kind!r}, {_UNSUPPORTED_BALANCING[kind]}"
                )
            if kind not in names:
                raise ValueError(
                    f"moe_router_load_balancing_type is {self.moe_router_load_balancing_type!r}; "
                    f"use {', '.join(map(repr, names[:-1]))} or {names[-1]!r}."
                )
        if len(set(kinds)) != len(kinds):
            raise ValueError(
                f"moe_router_load_balancing_type is {kinds!r}; name each loss once, with the sum "
                "of its coefficients."
            )


@dataclass
class MoERunFields(FieldGroup):
    """Fields of a run of a model with experts, which config.json does not hold."""

    moe_router_dtype: Literal["fp32", "fp64"] | None = "fp32"
    """dtype of the router's logits; None, which is core's default, means that of its input."""

    moe_router_force_biased: float | None = None
    """For benchmarks: choose by random logits, with a random bias per expert of this standard
    deviation; below 0 each layer keeps its bias. (A field of core since 0.19.)"""


@dataclass
class DenseAndExpertsFields(LayerFields):
    """An MLP and experts side by side: no fields besides those of both."""

    def check(self) -> None:
        for name in ("moe_latent_size", "moe_shared_expert_intermediate_size"):
            if (value := getattr(self, name)) is not None:
                raise ValueError(
                    f"{name} is {value}, but the experts of a layer B work on the whole hidden "
                    "state, next to an MLP instead of a shared expert. Leave it out, or set it for "
                    "the layers E alone, by layer_overrides."
                )
