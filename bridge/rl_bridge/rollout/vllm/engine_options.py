"""Options of an engine of vLLM, and which arguments of ``vllm.EngineArgs`` a user may give besides; without vLLM.

Allowed are arguments that move work between steps, devices and memory: draws and log-probabilities are the same but for
rounding. Every other argument is refused by name before anything starts. A test holds both lists to vLLM's own, so that
an argument which a new release brings is in neither, and fails.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from rl_bridge.common.argument_kinds import check_options
from rl_bridge.weights.source import LAYOUTS, Precision


def _by_name(groups: Mapping[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in groups.items() for name in names.split()}


ALLOWED = _by_name(
    {
        "memory for weights, keys and values": """
            gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override block_size cpu_offload_gb
            cpu_offload_params offload_backend offload_group_size offload_num_in_group offload_prefetch_step
            offload_params enable_sleep_mode sleep_mode_offload_cudagraph enable_cumem_allocator watermark
            disable_hybrid_kv_cache_manager""",
        "which rows and tokens a step computes together": """
            max_num_batched_tokens max_num_scheduled_tokens max_num_active_seqs enable_chunked_prefill
            long_prefill_token_threshold long_prefill_token_threshold_adaptive prefill_schedule_interval
            scheduler_reserve_full_isl scheduling_policy""",
        "keys and values of equal beginnings are computed once": """
            enable_prefix_caching prefix_caching_hash_algo prefix_cache_retention_interval prefix_match_unit""",
        "how the same model is computed: equal but for rounding": """
            model_impl attention_backend attention_config disable_cascade_attn compilation_config
            cudagraph_capture_sizes max_cudagraph_capture_size optimization_level performance_mode kernel_config
            linear_backend ir_op_priority enable_flashinfer_autotune""",
        "how the processes of one engine work together": """
            distributed_timeout_seconds cpu_distributed_timeout_seconds disable_custom_all_reduce
            enable_shm_tensor_arena numa_bind numa_bind_nodes numa_bind_cpus master_addr master_port
            max_parallel_loading_workers""",
        "how the folder that the engine starts from is read": """
            trust_remote_code safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size
            use_tqdm_on_load""",
        "messages, statistics and traces": """
            disable_log_stats aggregate_engine_logging log_level log_config_file logging_config
            show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces kv_cache_metrics
            kv_cache_metrics_sample custom_histogram_buckets cudagraph_metrics enable_layerwise_nvtx_tracing
            enable_mfu_metrics enable_logging_iteration_details jit_monitor_mode jit_monitor_verbose profiler_config
            shutdown_timeout fail_on_environ_validation""",
    }
)
"""Name → why it may be given."""

REFUSED = _by_name(
    {
        "it changes what is drawn, or its log-probabilities": """
            speculative_config spec_method spec_model spec_tokens per_request_spec_decode_metrics logits_processors
            logprobs_mode max_logprobs use_fp64_gumbel watermark_config diffusion_config generation_config
            override_generation_config seed structured_outputs_config reasoning_config reasoning_parser
            reasoning_parser_plugin enable_trace_replay return_sampling_mask enable_batch_sharded_sampling""",
        "it changes the model that draws": """
            model_weights hf_config_path config_format hf_overrides model_class_overrides kv_cache_dtype
            kv_cache_dtype_skip_layers disable_sliding_window kv_sharing_fast_prefill swa_bounded_replay load_format
            model_loader_extra_config ignore_patterns pt_load_map_location additional_config runner convert
            pooler_config quantization_config allow_deprecated_quantization mamba_config mamba_cache_dtype
            mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode enable_mamba_shared_prefix_checkpoint
            replayssm_buffer_len use_replayssm mamba_backend mamba_ssu_algorithm
            enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds gdn_prefill_backend kda_prefill_backend
            kda_decode_backend sparse_indexer_topk_backend engram_config""",
        "this library says it to the engine itself, or by an option of its own (rl-fn train policy --help)": """
            model served_model_name tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init
            download_dir revision code_revision hf_token dtype quantization max_model_len max_num_seqs enforce_eager
            device_ids tensor_parallel_size distributed_executor_backend
            enable_lora max_loras max_lora_rank fully_sharded_loras max_cpu_loras lora_dtype
            lora_target_modules specialize_active_lora default_mm_loras enable_tower_connector_lora
            enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels weight_transfer_config worker_cls
            worker_extension_cls scheduler_cls async_scheduling stream_interval tokens_only
            sleep_preserve_parameter_names""",
        "requests are submitted once, and are answered all": "max_num_queued_reqs max_num_queued_tokens",
        "weights are not carried into engines that are cut so": """
            pipeline_parallel_size nnodes node_rank prefill_context_parallel_size decode_context_parallel_size
            dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size data_parallel_size
            data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address
            data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb
            data_parallel_multi_port_external_lb data_parallel_backend enable_hc_sp enable_expert_parallel
            enable_ep_weight_filter moe_backend all2all_backend enable_elastic_ep elastic_ep_max_dp_size enable_dbo
            ubatch_size dbo_decode_token_threshold dp_sync_interval dbo_prefill_token_threshold
            disable_nccl_for_dp_synchronization eplb_config enable_eplb expert_placement_strategy _api_process_count
            _api_process_rank ray_workers_use_nsight enable_nccl_comm_suspend enable_fault_tolerance
            fault_tolerance_config""",
        "keys and values that come from elsewhere are of other weights": """
            kv_transfer_config kv_events_config kv_offloading_size kv_offloading_backend ec_transfer_config
            ec_manager_config""",
        "requests here are token ids, and replies are tokens": """
            enable_return_routed_experts aux_output_config enable_prompt_embeds allowed_local_media_path
            allowed_media_domains language_model_only limit_mm_per_prompt enable_mm_embeds interleave_mm_strings
            media_io_kwargs mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm
            mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend
            mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
            mm_encoder_fp8_scale_save_margin io_processor_plugin renderer_num_workers skip_mm_profiling
            video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb
            mm_device_do_normalize disable_chunked_mm_input enable_mm_processor_stats""",
    }
)
"""Name → why it may not."""


def require_allowed(name: str) -> None:
    """Refuse an argument that is not on the list.

    >>> require_allowed("block_size")
    >>> require_allowed("speculative_config")
    Traceback (most recent call last):
    ValueError: vLLM's argument 'speculative_config' is refused: it changes what is drawn, or its log-probabilities

    Raises:
        ValueError: the message has the reason, or the nearest names.
    """
    if name in ALLOWED:
        return
    if name in REFUSED:
        raise ValueError(f"vLLM's argument {name!r} is refused: {REFUSED[name]}")
    near = difflib.get_close_matches(name, ALLOWED, n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else " (docs/rollouts.md has the list)"
    raise ValueError(f"{name!r} is no argument of vLLM that may be given{hint}")


Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class VLLMOptions:
    """Options of an engine of vLLM.

    >>> VLLMOptions(precision="bf16").activations
    'bfloat16'
    """

    precision: Precision = "fp32"
    """The precision of the engine's matrices. The trainer's weights stay as they are; updates convert the sent ones."""
    rank_precisions: tuple[Precision, ...] = ()
    """The precisions of the engines of data-parallel workers, in turn, in the place of ``precision``: with a list of
    two every other engine has the second. Each engine is sent the same weights and quantises them itself."""
    dtype: Dtype | None = None
    """The dtype of activations and of tensors that are not quantised. None: float32 for fp32, else bfloat16."""
    max_model_len: int | None = None
    """Tokens of the longest sequence, prompt and completion. None: as many as the model can read."""
    max_num_seqs: int = 256
    """Sequences that run together; others wait."""
    kv_cache_gib: float | None = 1.0
    """Memory for keys and values, in GiB. None: what vLLM finds left on the device."""
    enforce_eager: bool = True
    """No compilation and no CUDA graphs: a start of seconds. Long runs on a GPU are faster with False."""
    sleep: bool = False
    """Let weights, keys and values leave a GPU while others work there (vLLM's sleep mode)."""
    tensor_parallel_size: int = 1
    """Processes that one engine is cut over, each with its share of every layer."""
    adapter_rank: int | None = None
    """Take LoRA adapters of up to this rank as such, beside the weights that the engine started from. None: merged."""
    replacements: int = 3
    """Weight updates in a row that may need a fresh engine; with one more the run stops."""
    proof_tolerance: float | None = None
    """Nats between engine and trainer that the proof of an update allows in the mean, and in proportion at most. None:
    by the precision, 0.3 for quantised matrices. A model that int8 changes more can be allowed more; it needs a
    correction all the more."""
    arguments: tuple[str, ...] = ()
    """More arguments of ``vllm.EngineArgs``, each ``NAME=JSON``: ``gpu_memory_utilization=0.4``. Those that change
    draws, their log-probabilities or the model are refused by name (docs/rollouts.md has the list)."""

    def __post_init__(self) -> None:
        """Refuse what no engine can be.

        Raises:
            ValueError: with the option and its value.
        """
        check_options(self)
        for precision in self.rank_precisions:
            if precision not in get_args(Precision):
                raise ValueError(f"precision must be one of {', '.join(get_args(Precision))}, got {precision!r}")
        if self.rank_precisions and self.precision != "fp32":
            raise ValueError(f"either precision or rank_precisions, got {self.precision} and {self.rank_precisions}")
        if self.rank_precisions and self.tensor_parallel_size > 1:
            raise ValueError(
                "an engine that quantises by itself (rank_precisions) is of one process, got tensor_parallel_size="
                f"{self.tensor_parallel_size}: take precision"
            )
        kinds = {"fp32", "bf16"} & {*self.rank_precisions}
        if len(kinds) > 1 or (kinds == {"bf16"} and self.dtype == "float32"):
            raise ValueError(
                f"all ranks have one dtype of activations, got {self.rank_precisions} and dtype {self.dtype}"
            )
        for name in (
            "max_model_len",
            "max_num_seqs",
            "tensor_parallel_size",
            "kv_cache_gib",
            "adapter_rank",
            "proof_tolerance",
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if self.replacements < 0:
            raise ValueError(f"replacements must be ≥ 0, got {self.replacements}")
        self.engine_arguments()

    @property
    def activations(self) -> Dtype:
        """The dtype of activations."""
        plain = self.precision == "fp32" if not self.rank_precisions else "fp32" in self.rank_precisions
        return self.dtype or ("float32" if plain else "bfloat16")

    def require_sleep(self, device: str) -> None:
        """Refuse ``sleep`` on a kind of device without it: vLLM logs a line, and does nothing.

        >>> VLLMOptions(sleep=True).require_sleep("cpu")
        Traceback (most recent call last):
            ...
        ValueError: an engine of vLLM on a cpu has no sleep of level 1 (weights go to host memory, ...

        Raises:
            ValueError: naming the device.
        """
        if self.sleep and device == "cpu":
            what = "weights go to host memory, keys and values are freed"
            raise ValueError(f"an engine of vLLM on a {device} has no sleep of level 1 ({what})")

    def of_build(self, tensor_parallel_size: int) -> "VLLMOptions":
        """The options with the ``tensor_parallel_size`` that ``InferenceEngine.build`` was given; 1 is none.

        >>> VLLMOptions().of_build(2).tensor_parallel_size
        2

        Raises:
            ValueError: the options say another number.
        """
        if tensor_parallel_size == 1 or tensor_parallel_size == self.tensor_parallel_size:
            return self
        if self.tensor_parallel_size != 1:
            raise ValueError(
                f"build(tensor_parallel_size={tensor_parallel_size}) and "
                f"VLLMOptions(tensor_parallel_size={self.tensor_parallel_size}): say one number"
            )
        return replace(self, tensor_parallel_size=tensor_parallel_size)

    def of_rank(self, rank: int) -> tuple["VLLMOptions", Precision | None]:
        """The options of a data-parallel worker, and what its engine quantises by itself, if anything.

        >>> VLLMOptions(rank_precisions=("fp32", "int8")).of_rank(3)[1]
        'int8'
        """
        if not self.rank_precisions:
            return self, None
        precision = self.rank_precisions[rank % len(self.rank_precisions)]
        options = replace(self, precision=precision, dtype=self.activations, rank_precisions=())
        return options, precision if precision in LAYOUTS else None

    def own_arguments(self) -> dict[str, Any]:
        """Arguments of ``vllm.EngineArgs`` that every engine gets, in this process or behind a server."""
        own: dict[str, Any] = {
            "dtype": self.activations,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "enforce_eager": self.enforce_eager,
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "logprobs_mode": "processed_logprobs",
            # The folder's generation_config.json must not change how rl_bridge samples.
            "generation_config": "vllm",
            "seed": 0,
        }
        if self.tensor_parallel_size > 1:
            own["tensor_parallel_size"] = self.tensor_parallel_size
        if self.kv_cache_gib is not None:
            own["kv_cache_memory_bytes"] = int(self.kv_cache_gib * 2**30)
        return own

    def engine_arguments(self) -> dict[str, Any]:
        """``arguments`` by name.

        >>> VLLMOptions(arguments=("gpu_memory_utilization=0.4", "enable_sleep_mode=true")).engine_arguments()
        {'gpu_memory_utilization': 0.4, 'enable_sleep_mode': True}

        Raises:
            ValueError: for text that is not ``NAME=JSON``, and for names that are not on ``arguments.ALLOWED``.
        """
        values = {}
        for text in self.arguments:
            name, _, value = text.partition("=")
            name = name.strip().removeprefix("--").replace("-", "_")
            require_allowed(name)
            try:
                values[name] = json.loads(value)
            except json.JSONDecodeError as error:
                raise ValueError(f"an argument of vLLM is NAME=JSON, got {text!r}") from error
        return values
