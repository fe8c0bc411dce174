"""Map each row of the list of failures to its tests; `test_failure_coverage.py` checks the map.

`O` ownership, `D` dispatch and runs, `P` PostgreSQL, `S` content and security. A test is
`file::name`, the file below `tests/`; `OPEN` lists the parts of a row that no test covers.
"""

from __future__ import annotations

COVERED: dict[str, tuple[str, tuple[str, ...]]] = {
    "O1": (
        "a worker that lost its lease finishes all the same",
        (
            "faults/test_ownership.py::test_a_stopped_worker_loses_its_job_to_a_sibling_and_leaves_with_77",
            "test_invariant_claims.py::test_a_superseded_claim_writes_nothing",
            "test_invariant_claims.py::test_a_lost_claim_claims_nothing_in_its_place",
            "integration/test_claim_worker.py::test_a_worker_that_lost_its_claim_writes_nothing_and_leaves_with_77",
        ),
    ),
    "O2": (
        "two processes under one label",
        (
            "faults/test_ownership.py::test_a_stopped_worker_loses_its_job_to_a_sibling_and_leaves_with_77",
            "integration/test_claim_worker.py::test_two_workers_of_one_label_never_touch_each_others_job",
            "test_invariant_claims.py::test_two_workers_of_one_label_are_two",
        ),
    ),
    "O3": (
        "a guard that outlives its job",
        (
            "unit/test_desk_decisions.py::test_a_guard_that_fails_after_the_handler_has_ended_ends_nothing",
            "integration/test_worker_control.py::test_the_watcher_stops_its_own_worker_and_no_other",
            "unit/test_desk_decisions.py::test_the_first_job_of_many_does_not_keep_the_budget_of_the_one_before",
        ),
    ),
    "O4": (
        "a handler that carries on without its lease",
        (
            "faults/test_exit_deadlines.py::test_a_worker_that_cannot_renew_is_gone_before_its_lease_is",
            "unit/test_guards.py::test_lease_guard_fails_before_the_lease_lapses",
            "integration/test_kill_timer.py::test_no_timer_is_left_over_and_the_clock_counts_suspend",
        ),
    ),
    "O5": (
        "an exit that waits for the database, or for the GIL",
        (
            "faults/test_exit_deadlines.py::test_the_budgets_exit_does_not_wait_for_a_frozen_database",
            "faults/test_exit_deadlines.py::test_the_budget_ends_a_handler_that_keeps_the_gil",
            "faults/test_exit_deadlines.py::test_sigterm_does_not_wait_for_a_frozen_database",
            "faults/test_held_gil.py::test_an_idle_gpu_job_ends_its_executor_alone_and_runs_again",
            "integration/test_kill_timer.py::test_it_exits_on_time_while_a_c_call_keeps_the_gil",
        ),
    ),
    "O6": (
        "a probe that cannot be read counts as idle",
        (
            "integration/test_worker_usage.py::test_a_machine_without_tools_leaves_its_gpu_jobs_to_the_clock",
            "integration/test_worker_usage.py::test_without_tools_the_reading_is_unknown_with_a_reason",
            "unit/test_guards.py::test_without_a_probe_every_job_ends_by_the_clock",
        ),
    ),
    "O7": (
        "a job that kills its workers for ever",
        (
            "faults/test_ownership.py::test_a_job_that_kills_three_workers_is_poison_and_its_error_has_the_cause",
            "integration/test_node_queue.py::test_a_crashed_job_goes_to_the_front_then_waits_then_is_poison",
            "integration/test_crash_recovery.py::test_a_poisoned_jobs_error_names_the_last_worker_how_it_died_and_its_last_beat",
            "integration/test_jobs_with_a_crash.py::test_each_is_claimed_alone_and_what_follows_at_once",
            "faults/test_held_gil.py::test_when_an_executor_dies_only_the_batch_job_whose_handler_ran_counts_a_crash",
            "e2e/test_roles.py::test_a_supervised_worker_that_is_killed_loses_nothing_and_comes_back",
        ),
    ),
    "O8": (
        "a restarted orchestrator requeues what runs",
        (
            "faults/test_ownership.py::test_twenty_restarts_of_the_orchestrator_requeue_nothing_of_the_living",
            "integration/test_orchestrator.py::test_boot_takes_back_what_is_lapsed_or_ownerless_and_nothing_else",
            "integration/test_node_pool.py::test_a_restart_under_work_touches_no_fresh_lease",
        ),
    ),
    "O9": (
        "a stop that waits for the handler, and burns its attempt",
        (
            "faults/test_ownership.py::test_a_rolling_restart_under_load_burns_no_attempt_and_is_done_by_its_deadline",
            "e2e/test_roles.py::test_a_handler_that_does_not_end_is_handed_back_uncounted",
            "integration/test_batches.py::test_a_stop_hands_back_at_once_all_but_the_job_that_runs",
            "e2e/test_roles.py::test_sigterm_lets_the_handler_end_and_claims_no_more",
            "e2e/test_roles.py::test_the_shutdown_timeout_is_an_option",
        ),
    ),
    "O10": (
        "recovery that kills the living",
        (
            "faults/test_ownership.py::test_a_handler_that_keeps_the_gil_past_the_window_is_not_dead",
            "faults/test_ownership.py::test_an_outage_longer_than_the_window_makes_nobody_dead",
            "faults/test_ownership.py::test_a_killed_worker_without_parent_is_replaced_within_one_and_a_half_windows",
            "integration/test_node_pool.py::test_staleness_counts_only_once_the_database_was_there_for_a_whole_window",
            "integration/test_node_pool.py::test_a_worker_without_session_and_renewal_is_dead_before_its_lease_ends",
        ),
    ),
    "D1": (
        "a crash between expanding a run and its status; runs that hide others",
        (
            "faults/test_dispatch_faults.py::test_a_new_run_starts_within_two_seconds_beside_sixty_that_wait_for_a_person",
            "faults/test_dispatch_faults.py::test_failing_or_waiting_events_do_not_delay_later_ones",
            "faults/test_failpoints.py::test_a_role_killed_at_any_commit_loses_and_doubles_nothing",
            "faults/test_every_statement.py::test_a_connection_lost_at_any_statement_loses_and_doubles_nothing",
            "integration/test_dispatcher.py::test_sixty_parked_runs_do_not_keep_a_new_one_from_starting",
            "integration/test_dispatcher.py::test_a_start_raced_by_many_queues_each_node_once",
        ),
    ),
    "D2": (
        "a drain that deadlocks with its own callback",
        (
            "integration/test_dispatcher.py::test_an_engine_pool_of_one_connection_is_enough",
            "integration/test_dispatcher_hooks.py::test_no_app_code_ever_runs_inside_an_engine_transaction",
            "integration/test_db.py::test_an_engine_transaction_that_is_rolled_back_keeps_its_time_outs",
        ),
    ),
    "D3": (
        "a cancelled run that comes back",
        (
            "integration/test_run_store.py::test_no_plain_update_leaves_a_terminal_state_but_to_reopen",
            "integration/test_dispatcher.py::test_nothing_changes_a_cancelled_run",
            "integration/test_run_store.py::test_a_finished_run_keeps_its_status",
            "integration/test_dispatcher_hooks.py::test_a_run_cancelled_while_its_provider_thinks_is_not_written",
        ),
    ),
    "D4": (
        "a graph that never ends, or ends with nodes dropped",
        (
            "integration/test_dispatcher.py::test_a_workflow_that_cannot_run_fails_its_run_at_once_with_the_reason",
            "integration/test_dispatcher.py::test_a_run_with_everything_skipped_is_completed",
            "test_invariant_runs.py::test_every_run_ends_and_no_invariant_is_broken",
            "test_invariant_dispatch.py::test_an_undisturbed_run_ends_as_its_graph_requires",
        ),
    ),
    "D5": (
        "an answer lost, changed, or raced",
        (
            "integration/test_input_nodes.py::test_a_crash_half_way_loses_no_answer_and_takes_it_once",
            "integration/test_input_nodes.py::test_an_answer_stays_what_it_was",
            "integration/test_input_nodes.py::test_the_first_answer_wins_and_the_second_is_refused_in_words",
            "integration/test_input_nodes.py::test_an_answer_that_comes_while_the_first_is_being_taken_is_refused",
            "integration/test_input_nodes.py::test_an_answer_that_was_taken_counts_even_if_the_run_cannot_go_on_yet",
        ),
    ),
    "D6": (
        "a result or an error text that cannot be stored",
        (
            "integration/test_node_executor.py::test_a_result_that_cannot_be_stored_fails_the_node_with_the_reason",
            "integration/test_ingest_executor.py::test_a_result_that_cannot_be_stored_fails_the_job_with_the_reason",
            "integration/test_node_executor.py::test_an_error_whose_text_cannot_be_had_fails_its_node_too",
            "unit/test_payload.py::test_what_cannot_be_stored_is_refused_by_name",
            "unit/test_payload.py::test_an_error_text_is_storable_and_cut",
        ),
    ),
    "D7": (
        "the handler is done and the database away",
        (
            "integration/test_claim_worker.py::test_a_connection_that_dies_under_the_handler_costs_nothing",
            "integration/test_claim_worker.py::test_a_commit_whose_reply_was_lost_is_not_written_twice",
            "integration/test_claim_worker.py::test_a_job_claimed_by_a_commit_whose_reply_was_lost_is_given_back",
            "test_invariant_claims.py::test_a_claim_has_recorded_what_its_own_event_contains",
        ),
    ),
    "D8": (
        "two orchestrators dispatch the same event",
        (
            "faults/test_dispatch_faults.py::test_two_orchestrators_of_which_one_keeps_dying_dispatch_each_event_once",
            "integration/test_dispatcher.py::test_two_dispatchers_on_one_run_make_no_error_and_no_double",
        ),
    ),
    "D9": (
        "what is finished piles up; jobs of dead runs stay queued",
        (
            "integration/test_run_store.py::test_cancel_by_a_plain_update_cancels_what_waits_in_the_same_transaction",
            "integration/test_node_pool.py::test_orphans_of_a_run_that_is_over_are_cancelled",
            "integration/test_retention.py::test_runs_go_with_all_that_is_theirs",
            "integration/test_retention.py::test_a_queue_has_its_own_time_or_that_of_all",
            "integration/test_retention.py::test_all_that_is_only_history_goes_by_its_age",
            "integration/test_retention.py::test_the_orchestrator_prunes",
            "integration/test_retention_batches.py::test_the_orchestrator_stops_between_batches",
        ),
    ),
    "D10": (
        "UPDATE ... IN (SELECT ... LIMIT) takes more",
        (
            "faults/test_dispatch_faults.py::test_a_claim_takes_no_more_than_requested_by_the_worst_plan",
            "faults/test_dispatch_faults.py::test_no_statement_limits_what_it_locks_inside_an_in",
            "test_invariant_claims.py::test_batches_at_once_share_no_job",
        ),
    ),
    "D11": (
        "`not running` read as dead",
        (
            "faults/test_dispatch_faults.py::test_only_the_end_of_a_run_ends_its_jobs_at_a_restart",
            "integration/test_node_queue.py::test_a_run_status_of_the_app_stops_no_claim",
        ),
    ),
    "P1": (
        "a dropped LISTEN connection",
        (
            "faults/test_server_faults.py::test_connections_terminated_again_and_again_end_no_worker_and_hide_no_off",
            "faults/test_server_faults.py::test_a_worker_that_lost_all_its_connections_listens_again",
            "faults/test_server_faults.py::test_an_idle_worker_whose_claiming_connection_ends_claims_again_without_a_poll",
            "integration/test_listen.py::test_a_lost_connection_is_replaced_and_later_notifications_are_received",
            "integration/test_listen.py::test_it_continues_polling_and_logs_once_that_the_database_is_unreachable",
        ),
    ),
    "P2": (
        "a half-open connection",
        (
            "integration/test_listen.py::test_a_frozen_peer_is_noticed_within_15_seconds",
            "integration/test_listen.py::test_a_frozen_peer_is_noticed_left_and_found_again",
            "integration/test_db.py::test_only_the_engines_own_connections_carry_time_outs",
            "faults/test_exit_deadlines.py::test_a_worker_that_cannot_renew_is_gone_before_its_lease_is",
        ),
    ),
    "P3": (
        "NOTIFY's lock",
        (
            "integration/test_node_queue.py::test_a_statement_of_many_rows_notifies_once_a_queue",
            "integration/test_ingest_queue.py::test_many_jobs_are_one_statement_with_one_wake_up",
            "integration/test_claim_worker.py::test_without_listening_the_polls_find_work_and_off",
        ),
    ),
    "P4": (
        "a payload over 8,000 bytes",
        ("integration/test_schema.py::test_a_name_that_no_notification_could_carry_is_refused",),
    ),
    "P5": (
        "a claim that sorts",
        (
            "test_invariant_claim_plans.py::test_every_pick_walks_its_index_in_order",
            "test_invariant_claim_plans.py::test_a_claim_among_many_reads_a_few_rows",
        ),
    ),
    "P6": (
        "dead tuples, renewals that are not HOT",
        (
            "integration/test_doctor.py::test_indexes_that_make_renewals_slow",
            "integration/test_doctor_checks.py::test_renewals_that_are_not_hot",
        ),
    ),
    "P7": (
        "bootstraps that race",
        (
            "integration/test_schema.py::test_of_20_starters_one_migrates_and_none_fails",
            "integration/test_schema.py::test_a_migration_that_changed_after_it_was_applied_is_reported",
        ),
    ),
    "P8": (
        "a rolling upgrade",
        (
            "faults/test_server_faults.py::test_workers_of_today_go_on_while_a_step_that_only_adds_is_applied_and_after",
            "faults/test_server_faults.py::test_a_worker_of_tomorrow_waits_for_its_schema_and_touches_nothing",
            "faults/test_server_faults.py::test_a_schema_that_breaks_with_today_is_refused_by_name",
            "integration/test_schema.py::test_a_newer_database_is_refused_only_when_marked_incompatible",
            "e2e/test_roles.py::test_a_wait_for_the_schema_is_logged_once",
        ),
    ),
    "P9": (
        "a downgrade that loses data",
        (
            "integration/test_schema.py::test_a_downgrade_that_loses_something_lists_it_and_changes_nothing",
            "integration/test_schema.py::test_rows_written_during_the_check_of_a_downgrade_are_not_lost_unreported",
        ),
    ),
    "P10": (
        "a pooler in transaction mode",
        (
            "e2e/test_pooler.py::test_up_serves_jobs_runs_questions_and_a_schedule",
            "e2e/test_pooler.py::test_cancel_off_and_a_worker_that_dies",
        ),
    ),
    "P11": (
        "a restart of the server",
        (
            "integration/test_embedded.py::test_a_server_that_was_killed_is_started_again_for_its_users",
            "integration/test_orchestrator.py::test_a_database_that_goes_away_during_the_bootstrap_is_waited_for",
        ),
    ),
    "P13": (
        "clocks that step",
        (
            "faults/test_server_faults.py::test_a_wall_clock_an_hour_off_that_steps_stops_and_requeues_nothing",
            "integration/test_schedule_rows.py::test_a_clock_that_steps_an_hour_back_and_forth_fires_nothing_twice",
            "integration/test_scheduler.py::test_due_is_decided_by_the_databases_clock",
        ),
    ),
    "P14": (
        "schedules that fire twice, or not",
        (
            "integration/test_schedule_rows.py::test_a_scheduler_that_is_killed_in_a_fire_loses_and_doubles_nothing",
            "integration/test_old_style_entries.py::test_entries_keep_their_catch_up_of_an_hour_and_never_wait_for_each_other",
            "integration/test_scheduler.py::test_a_restart_fires_nothing_again_and_what_came_due_meanwhile",
        ),
    ),
    "P15": (
        "a fork that shares sockets",
        (
            "faults/test_server_faults.py::test_children_of_a_handler_have_connections_and_names_of_their_own",
            "faults/test_server_faults.py::test_a_kept_connection_stays_in_the_process_that_opened_it",
            "faults/test_server_faults.py::test_workers_forked_from_one_are_two",
            "integration/test_db.py::test_a_fork_drops_the_pool_and_leaves_the_parents_connections_alone",
            "integration/test_db.py::test_a_fork_while_a_thread_opens_the_pool_does_not_hang_the_child",
            "integration/test_embedded.py::test_a_forked_child_gives_nothing_back",
            "integration/test_kill_timer.py::test_a_forked_child_has_its_own_timer_or_none",
        ),
    ),
    "P16": (
        "the embedded server's own accidents",
        (
            "integration/test_embedded.py::test_it_survives_kill_9_of_its_starter_again_and_again",
            "integration/test_embedded.py::test_a_stale_pid_file_is_no_obstacle",
            "integration/test_embedded.py::test_four_starts_at_once_make_one_server",
        ),
    ),
    "S1": (
        "a row that imports anything",
        ("integration/test_node_executor.py::test_no_string_of_a_row_is_ever_imported",),
    ),
    "S2": (
        "a ref that walks attributes",
        (
            "unit/test_refs.py::test_attributes_are_never_walked",
            "unit/test_refs.py::test_methods_of_containers_are_not_reachable",
        ),
    ),
    "S3": (
        "data that looks like a ref",
        (
            "integration/test_dispatcher.py::test_data_that_looks_like_a_ref_stays_data",
            "unit/test_refs.py::test_what_a_ref_finds_is_data_even_when_it_looks_like_a_ref",
        ),
    ),
    "S4": (
        "a pattern that burns the orchestrator",
        (
            "unit/test_refs.py::test_the_evil_corpus_takes_less_than_200_ms_in_all",
            "unit/test_refs.py::test_unsafe_patterns_are_refused",
        ),
    ),
    "S5": (
        "a node id that is a path",
        (
            "integration/test_node_executor.py::test_a_node_id_that_leads_outside_the_runs_folder_is_refused",
        ),
    ),
    "S6": (
        "depth and size without bounds",
        (
            "unit/test_payload.py::test_nesting_is_bounded",
            "unit/test_payload.py::test_size_is_bounded_and_the_text_has_the_limit",
            "unit/test_refs.py::test_depth_is_bounded_by_a_clear_error",
            "integration/test_dispatcher.py::test_more_nodes_than_a_run_may_have_are_refused",
        ),
    ),
    "S7": (
        "a password in an error",
        (
            "integration/test_db.py::test_no_error_and_no_log_line_holds_the_password",
            "integration/test_entry_point.py::test_mask_hides_passwords_and_nothing_else",
        ),
    ),
    "S9": (
        "roles that may too much",
        (
            "e2e/test_run.py::test_workers_and_apps_need_no_more_rights_than_the_guide_grants",
            "test_invariant_lock_keys.py::test_no_session_gets_its_own_code_run_as_the_owner_of_the_schema",
        ),
    ),
}
OPEN: dict[str, str] = {
    "P6": "the throughput beside a snapshot of ten minutes",
    "P11": "a failover to a standby",
    "P12": "a full disk, a server without free connections",
    "S8": "there is no HTTP service yet",
}
