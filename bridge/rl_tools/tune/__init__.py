"""``rl-fn tune``: a study over a training command, with seeds as repetitions and a journal that survives kills."""
