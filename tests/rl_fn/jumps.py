"""Functions that are not differentiable at ties."""

# A share of the rewards' spread jumps where there is no spread, and what goes by rank has no slope in all directions.
JUMPS = {
    "whiten",
    "gpg_advantages",
    "reinforce_pp_baseline_advantages",
    "gdpo_advantages",
    "grpo_advantages",
    "step_group_advantages",
}
RANKED = {"aot", "aot_unpaired", "passk_advantages", "passk_analytic_advantages", "crowding_distance"}
RANKED |= {"top_k", "top_p", "min_p"}
