"""metrics.jsonl written again for other programs: TensorBoard, Weights & Biases, MLflow, trackio; live or later."""
