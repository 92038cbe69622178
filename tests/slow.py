"""The slow tests, as data: `make test` leaves them out, `make test-slow` runs them, CI runs both.

A test is slow if it takes more than 3 seconds of the processor. Tests under `pytest.mark.slow` are slow too
(combinations that are too many for the quick loop), and those under `pytest.mark.hours` are in neither: `make
test-hours` runs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

SLOW: Mapping[str, tuple[str, ...]] = {
    "tests/advise/plan/test_arithmetic.py": ("test_bytes_of_a_large_model_are_those_of_hand_arithmetic",),
    "tests/benchmarks/test_gpu_first.py": ("test_every_line_of_the_blocks_runs_in_a_dry_run",),
    "tests/benchmarks/test_lens.py": (
        "test_a_box_of_a_good_run_keeps_nothing_on_a_cpu_and_of_a_bad_one_the_last_batch",
        "test_a_measured_case_says_everything",
        "test_explaining_and_auditing_leave_the_first_time_out",
    ),
    "tests/docs/test_pages.py": ("test_each_program_is_a_script_of_its_own",),
    "tests/cli/test_start.py": ("test_a_plan_as_json_is_all_that_is_on_standard_output",),
    "tests/cli/test_compare.py": ("test_without_the_images_the_gpt_runs_alone", "test_python_dash_m"),
    "tests/cli/test_run_policy.py": (
        "test_processes_that_a_script_starts_follow_the_policy_too",
        "test_the_sitecustomize_of_the_environment_still_runs",
    ),
    "tests/compat/apex/test_parallel.py": ("test_two_processes_reduce_as_apexs_arguments_say",),
    "tests/compat/apex/test_run.py": ("test_processes_that_a_script_starts_find_apex_too",),
    "tests/compat/megengine/test_grad_scaler.py": (
        "test_the_scale_moves_as_megengines_for_any_numbers_and_any_overflows",
    ),
    "tests/compat/mindspore/test_scale_rules.py": ("test_a_rule_agrees_with_mindspore_exactly_over_random_sequences",),
    "tests/compat/torch_amp/test_seeds.py": ("test_the_processes_of_distributed_data_parallel_skip_together",),
    "tests/distributed/test_sample.py": ("test_a_sample_of_what_several_processes_do",),
    "tests/examples/test_examples.py": (
        "test_a_compiled_model_trains_as_the_eager_one",
        "test_a_gan_learns_with_one_scale_and_with_one_for_each_loss",
        "test_recurrent_layers_learn_in_every_format",
        "test_stages_of_a_pipeline_share_norm_and_verdict",
        "test_two_ranks_skip_together_and_stay_equal",
    ),
    "tests/faults/test_faults.py": ("test_one_bad_rank_makes_both_skip",),
    "tests/integrations/test_accelerate.py": ("test_two_processes_train_skip_and_resume_together",),
    "tests/integrations/test_fabric.py": ("test_two_processes_skip_together_and_stay_equal",),
    "tests/integrations/test_lightning.py": ("test_ddp_and_sharded_models",),
    "tests/integrations/test_torchao.py": (
        "test_a_checkpointed_block_and_a_compiled_model_give_the_same_gradients",
        "test_the_audit_measures_the_rounding_and_the_black_box_finds_a_nan",
        "test_the_bundled_gpt_trains_as_near_to_bf16_as_another_seed",
        "test_two_ranks_stay_equal_and_skip_together",
    ),
    "tests/integrations/test_transformers.py": ("test_a_smaller_batch_is_found", "test_compiled_by_torch"),
    "tests/kernels/test_native.py": (
        "test_those_who_compile_at_once_leave_one_whole_file_and_a_damaged_one_is_made_again",
    ),
    "tests/kernels/test_pages.py": (
        "test_settings_of_the_user_stay",
        "test_a_step_faults_no_pages_in_and_malloc_gives_back_after_it",
        "test_without_it_every_step_faults_them_in",
    ),
    "tests/kernels/test_triton.py": (
        "test_the_kernels_are_their_reference_in_triton_s_interpreter",
        "test_compiled_kernels_round_every_operation_and_load_many_bytes_at_once",
        "test_kernels_compile_for_an_amd_device",
        "test_offsets_of_every_kernel_reach_beyond_two_to_the_31_elements",
    ),
    "tests/lens/test_bad_loss.py": ("test_a_rank_explains_its_own_bad_loss_alone_and_a_bad_step_with_the_others",),
    "tests/lens/test_watch.py": ("test_run_explains_a_script",),
    "tests/lens/test_replayed.py": ("test_a_replay_elsewhere_gives_the_verdict_of_the_run",),
    "tests/lens/test_ranks.py": (
        "both",
        "test_a_rank_that_is_killed_while_the_others_wait_for_it_does_not_stop_them",
    ),
    "tests/scale/test_ranks.py": ("test_ranks_agree_on_a_skip",),
    "tests/step/test_auto_ranks.py": ("both",),
    "tests/step/test_weights.py": ("test_ranks_with_different_numbers_of_tokens_train_as_one_process",),
    "tests/step/test_byproducts.py": ("test_a_compiled_step_detaches_too",),
    "tests/step/test_save_ranks.py": (
        "test_two_processes_and_one_read_what_the_other_wrote",
        "test_a_signal_to_one_rank_ends_both_and_one_process_goes_on",
        "test_runs_that_are_killed_while_they_write_end_with_the_same_bits",
    ),
    "tests/step/test_two_ranks.py": ("both",),
    "tests/step/test_host_state.py": ("found", "plans"),
    "tests/step/test_exported.py": ("test_exported_and_lowered_files_open_and_run_where_halfstep_is_not_installed",),
    "tests/step/test_compiled.py": (
        "test_a_task_is_one_graph_and_trains_bit_for_bit_as_eager",
        "test_the_gpt_of_the_benchmarks_is_one_graph",
    ),
    "tests/tasks/test_measure.py": ("test_student_quantiles_are_scipys",),
    "tests/test_tables.py": ("test_documents_say_what_was_measured",),
    "tests/test_errors.py": ("test_at_the_top_of_a_script_and_of_a_thread",),
    "tests/test_package.py": ("wheel",),
    "tests/testing/test_host_device.py": ("found",),
    "tests/testing/test_fake_cuda.py": ("counted", "found", "test_the_library_is_built_once"),
    "tests/weights/test_ranks.py": ("test_ranks_hold_the_same_weights",),
    "tests/weights/test_split.py": ("test_bit_equal_to_masters_of_the_same_rounding_over_5000_steps",),
}
"""File -> its slow tests, and its fixtures that make every test slow that uses them."""


LONGEST = (
    "tests/step/test_host_state.py",
    "tests/kernels/test_triton.py",
    "tests/promises/test_promises.py",
    "tests/step/test_two_ranks.py",
    "tests/benchmarks/test_gpu_first.py",
    "tests/lens/test_ranks.py",
    "tests/step/test_save_ranks.py",
    "tests/testing/test_fake_cuda.py",
    "tests/cli/test_run_policy.py",
    "tests/lens/test_replayed.py",
    "tests/kernels/test_pages.py",
)
"""Files whose slow tests take the longest, the longest first: begun last, one of them would run alone at the end."""


def is_slow(file: str, test: str, fixtures: tuple[str, ...]) -> bool:
    """Return whether the table names a test of `file`, or one of its fixtures."""
    names = SLOW.get(file, ())
    return test in names or any(fixture in names for fixture in fixtures)


def slow_files() -> list[str]:
    """Return the files with a slow test, the longest first: `make test-slow` collects no others.

    Those of integrations are left out.
    """
    root = Path(__file__).resolve().parent.parent
    here = (path for path in (root / "tests").rglob("test_*.py") if "integrations" not in path.parts)
    marked = {str(path.relative_to(root)) for path in here if "mark.slow" in path.read_text(encoding="utf-8")}
    files = marked | {file for file in SLOW if "tests/integrations/" not in file}
    return [*LONGEST, *sorted(files - {*LONGEST})]


if __name__ == "__main__":
    print(*slow_files())
