"""Tools around rl_bridge: they read the folder of a run, or take the config of one."""
