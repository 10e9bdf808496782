"""docs/papers.md: which paper stands behind which public name, and which tests prove it.

python -m tests.repository.papers    # writes the page

Ids come from the docstrings and tests from the test files; only who wrote a paper and what it is called is kept here.
"""

import inspect
import re
from pathlib import Path

import rl_fn
from tests.oracle.lookup import ORACLE
from tests.rl_fn.registry import CASES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "papers.md"
ID = re.compile(r"\b(\d{4}\.\d{4,5})\b")

# First author (or the team that signs), title.
PAPERS = {
    "1308.3432": (
        "Bengio",
        "Estimating or Propagating Gradients Through Stochastic Neurons for Conditional Computation",
    ),
    "1411.0030": ("Maddison", "A* Sampling"),
    "1506.02438": ("Schulman", "High-Dimensional Continuous Control Using Generalized Advantage Estimation"),
    "1606.02647": ("Munos", "Safe and Efficient Off-Policy Reinforcement Learning (Retrace)"),
    "1608.03983": ("Loshchilov", "SGDR: Stochastic Gradient Descent with Warm Restarts"),
    "1706.02677": ("Goyal", "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour"),
    "1707.06347": ("Schulman", "Proximal Policy Optimization Algorithms"),
    "1712.05877": (
        "Jacob",
        "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference",
    ),
    "1802.01561": (
        "Espeholt",
        "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner Architectures",
    ),
    "1805.02867": ("Milakov", "Online Normalizer Calculation for Softmax"),
    "1805.04833": ("Fan", "Hierarchical Neural Story Generation"),
    "1805.11074": ("Tessler", "Reward Constrained Policy Optimization"),
    "1904.09751": ("Holtzman", "The Curious Case of Neural Text Degeneration"),
    "1909.05858": ("Keskar", "CTRL: A Conditional Transformer Language Model for Controllable Generation"),
    "1909.08593": ("Ziegler", "Fine-Tuning Language Models from Human Preferences"),
    "1912.09729": ("Ye", "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning"),
    "2005.12729": ("Engstrom", "Implementation Matters in Deep Policy Gradients: A Case Study on PPO and TRPO"),
    "2007.03964": ("Stooke", "Responsive Safety in Reinforcement Learning by PID Lagrangian Methods"),
    "2107.02027": ("Krell", "Efficient Sequence Packing without Cross-contamination"),
    "2107.03374": ("Chen", "Evaluating Large Language Models Trained on Code"),
    "2110.00641": ("Hilton", "Batch Size-Invariance for Policy Optimization"),
    "2203.02155": ("Ouyang", "Training Language Models to Follow Instructions with Human Feedback"),
    "2209.05433": ("Micikevicius", "FP8 Formats for Deep Learning"),
    "2211.10438": ("Xiao", "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models"),
    "2305.10425": ("Zhao", "SLiC-HF: Sequence Likelihood Calibration with Human Feedback"),
    "2305.18290": ("Rafailov", "Direct Preference Optimization: Your Language Model is Secretly a Reward Model"),
    "2306.08543": ("Gu", "MiniLLM: Knowledge Distillation of Large Language Models"),
    "2306.13649": ("Agarwal", "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes"),
    "2307.09288": ("Touvron", "Llama 2: Open Foundation and Fine-Tuned Chat Models"),
    "2309.06657": ("Liu", "Statistical Rejection Sampling Improves Preference Optimization"),
    "2309.16240": (
        "Wang",
        "Beyond Reverse KL: Generalizing Direct Preference Optimization with Diverse Divergence Constraints",
    ),
    "2310.10505": (
        "Li",
        "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large Language Models",
    ),
    "2310.12036": ("Azar", "A General Theoretical Paradigm to Understand Learning from Human Preferences"),
    "2311.09431": ("Brandon", "Striped Attention: Faster Ring Attention for Causal Transformers"),
    "2312.09244": (
        "Eisenstein",
        "Helping or Herding? Reward Model Ensembles Mitigate but do not Eliminate Reward Hacking",
    ),
    "2401.08417": (
        "Xu",
        "Contrastive Preference Optimization: Pushing the Boundaries of LLM Performance in Machine Translation",
    ),
    "2402.00856": ("Ji", "Towards Efficient Exact Optimization of Language Model Alignment"),
    "2402.01306": ("Ethayarajh", "KTO: Model Alignment as Prospect Theoretic Optimization"),
    "2402.03300": ("Shao", "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models"),
    "2402.05369": ("Chen", "Noise Contrastive Alignment of Language Models with Explicit Rewards"),
    "2402.14740": (
        "Ahmadian",
        "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs",
    ),
    "2403.00409": ("Chowdhury", "Provably Robust DPO: Aligning Language Models with Noisy Feedback"),
    "2403.07691": ("Hong", "ORPO: Monolithic Preference Optimization without Reference Model"),
    "2404.04656": ("Jung", "Binary Classifier Optimization for Large Language Model Alignment"),
    "2404.19733": ("Pang", "Iterative Reasoning Preference Optimization"),
    "2405.00675": ("Wu", "Self-Play Preference Optimization for Language Model Alignment"),
    "2405.14734": ("Meng", "SimPO: Simple Preference Optimization with a Reference-Free Reward"),
    "2405.16681": (
        "Saeidi",
        "Triple Preference Optimization: Achieving Better Alignment using a Single Step Optimization",
    ),
    "2405.19107": ("Richemond", "Offline Regularised Reinforcement Learning for Large Language Models Alignment"),
    "2406.05882": ("Melnyk", "Distributional Preference Alignment of LLMs via Optimal Transport"),
    "2406.08414": ("Lu", "Discovering Preference Optimization Algorithms with and for Large Language Models"),
    "2406.11704": ("Nvidia", "Nemotron-4 340B Technical Report"),
    "2406.11827": ("Zhou", "WPO: Enhancing RLHF with Weighted Preference Optimization"),
    "2407.01082": ("Nguyen", "Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM Outputs"),
    "2407.21783": ("Llama Team", "The Llama 3 Herd of Models"),
    "2408.00118": ("Gemma Team", "Gemma 2: Improving Open Language Models at a Practical Size"),
    "2408.06266": (
        "D'Oosterlinck",
        "Anchored Preference Optimization and Contrastive Revisions: Addressing Underspecification in Alignment",
    ),
    "2411.15124": ("Lambert", "Tülu 3: Pushing Frontiers in Open Language Model Post-Training"),
    "2501.03262": (
        "Hu",
        "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization",
    ),
    "2501.12599": ("Kimi Team", "Kimi k1.5: Scaling Reinforcement Learning with LLMs"),
    "2503.14286": ("Le Roux", "Tapered Off-Policy REINFORCE: Stable and Efficient Reinforcement Learning for LLMs"),
    "2503.14476": ("Yu", "DAPO: An Open-Source LLM Reinforcement Learning System at Scale"),
    "2503.19595": ("Tang", "Optimizing Language Models for Inference Time Objectives using Reinforcement Learning"),
    "2503.20783": ("Liu", "Understanding R1-Zero-Like Training: A Critical Perspective (Dr. GRPO)"),
    "2504.02546": ("Chu", "GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning"),
    "2504.05118": ("Yue", "VAPO: Efficient and Reliable Reinforcement Learning for Advanced Reasoning Tasks"),
    "2505.10978": ("Feng", "Group-in-Group Policy Optimization for LLM Agent Training"),
    "2505.22312": ("He", "Skywork Open Reasoner 1 Technical Report"),
    "2505.22617": ("Cui", "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models"),
    "2505.23585": ("Hao", "On-Policy RL with Optimal Reward Baseline"),
    "2505.24298": ("Fu", "AReaL: A Large-Scale Asynchronous Reinforcement Learning System for Language Reasoning"),
    "2506.01939": (
        "Wang",
        "Beyond the 80/20 Rule: High-Entropy Minority Tokens Drive Effective Reinforcement Learning for LLM Reasoning",
    ),
    "2506.13585": ("MiniMax", "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention (CISPO)"),
    "2507.18071": ("Zheng", "Group Sequence Policy Optimization"),
    "2507.20673": ("Zhao", "Geometric-Mean Policy Optimization"),
    "2508.10751": (
        "Chen",
        "Pass@k Training for Adaptively Balancing Exploration and Exploitation of Large Reasoning Models",
    ),
    "2510.01161": (
        "Zheng",
        "Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs? (M2PO)",
    ),
    "2510.18855": (
        "Ling Team",
        "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model (IcePop)",
    ),
    "2511.20347": ("Gao", "Soft Adaptive Policy Optimization"),
    "2512.02556": ("DeepSeek-AI", "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models"),
    "2601.05242": (
        "Liu",
        "GDPO: Group Reward-Decoupled Normalization Policy Optimization for Multi-Reward RL Optimization",
    ),
    "2602.02710": ("Tajwar", "Maximum Likelihood Reinforcement Learning"),
    "2602.04879": ("Qi", "Rethinking the Trust Region in LLM Reinforcement Learning (DPPO)"),
    "2602.05261": (
        "Liu",
        "Length-Unbiased Sequence Policy Optimization: Revealing and Controlling Response Length Variation in RLVR",
    ),
    "2602.07078": ("Li", "The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL"),
    "2602.10693": (
        "Shen",
        "VESPO: Variational Sequence-Level Soft Policy Optimization for Stable Off-Policy LLM Training",
    ),
    "2603.01365": ("Honari", "Align and Filter: Improving Performance in Asynchronous On-Policy RL (VACO)"),
}


# How far a citation was confirmed, on the date below; of all others author, title and id.
DATE = "2026-11-21"
# The paper's text was read: formula, numbers of equations and sections, constants.
READ = set(
    ID.findall(
        "1608.03983 2405.19107 2501.03262 2501.12599 2503.20783 2504.05118 2505.22312 2505.22617 "
        "2507.20673 2508.10751 2510.01161 2601.05242 2602.04879 2602.05261 2602.10693 "
        "2510.18855"
    )
)
# Numbers and constants as others quote them from the paper (trainers' sources, notes on the paper).
QUOTED = set(
    ID.findall(
        "1506.02438 1706.02677 1707.06347 1712.05877 1802.01561 1805.02867 1904.09751 1909.05858 "
        "1909.08593 1912.09729 2107.03374 2203.02155 2211.10438 2305.18290 2306.13649 2310.12036 "
        "2402.00856 2402.03300 2402.14740 2403.07691 2405.00675 2405.14734 2406.08414 2406.11827 "
        "2407.21783 2408.06266 2503.14286 2503.14476 2504.02546 2505.10978 2506.13585 2507.18071 "
        "2511.20347 2512.02556 2602.02710 2503.19595 2505.24298 2307.09288 2312.09244 2506.01939"
    )
)
NUMBERS = re.compile(r"arXiv (\d{4}\.\d{4,5})[^;]*?\b(?:equations?|sections?|algorithm|appendix)\s[A-Z0-9]")


def confirmed(key: str) -> str:
    """How far a citation was confirmed."""
    return "text" if key in READ else "quoted" if key in QUOTED else "title"


def public_docs() -> dict[str, str]:
    """Docstring of every public function, class and recipe of rl_fn."""
    objects = {name: getattr(rl_fn, name) for name in rl_fn.__all__}
    objects |= {f"recipes.{name}": getattr(rl_fn.recipes, name) for name in rl_fn.recipes.__all__}
    return {n: inspect.getdoc(x) or "" for n, x in objects.items() if inspect.isfunction(x) or inspect.isclass(x)}


def papers_of_names() -> dict[str, set[str]]:
    """Ids named in the docstring of each public name."""
    return {name: set(ID.findall(doc)) for name, doc in public_docs().items()}


# Where functions that take no case are tested, by their module.
TESTS_OF_MODULES = {
    "rl_fn.control.constraints": "test_constraints",
    "rl_fn.control.entropy": "test_control",
    "rl_fn.control.kl": "test_control",
    "rl_fn.control.schedules": "test_control",
    "rl_fn.multi_objective.archive": "test_archive",
    "rl_fn.multi_objective.hypervolume": "test_hypervolume",
    "rl_fn.objectives.recipes": "test_objectives",
    "rl_fn.packing": "test_packing",
}


def files_of(name: str) -> set[str]:
    """Where a public name is tested, below tests/ and without the ending."""
    files = {f"rl_fn/cases/{case.family}" for case in CASES.values() if case.name == name}
    if name in ORACLE:
        files.add(ORACLE[name].__module__.replace(".", "/").removeprefix("tests/"))
    owner = getattr(rl_fn.recipes, name.removeprefix("recipes.")) if "." in name else getattr(rl_fn, name)
    return files | {f"rl_fn/{test}" for module, test in TESTS_OF_MODULES.items() if owner.__module__.startswith(module)}


def page() -> str:
    """The page."""
    names_of = {key: sorted(n for n, ids in papers_of_names().items() if key in ids) for key in PAPERS}
    lines = [
        "# Papers",
        "",
        "Generated from the docstrings and the tests by `python -m tests.repository.papers`; a test compares.",
        "A docstring names an equation or a section only where that was confirmed, and tells where practice",
        f"differs. Confirmed on {DATE}: `text`, against the paper's text (formula, numbers, constants); `quoted`,",
        "against what others quote of it (trainers' sources, notes); `title`, no more than author, title and id. Tests",
        "are files of `tests/` without `.py`, those of `tests/rl_fn/` without the folder; `cases/…` are what all laws",
        "are generated from: masking, extremes, jit, vmap, gradient, order, padding, oracle, PyTorch.",
        "",
        "| paper | arXiv | confirmed | names in `rl_fn` | tests |",
        "|---|---|---|---|---|",
    ]
    for key, (author, title) in PAPERS.items():
        files = sorted({file.removeprefix("rl_fn/") for name in names_of[key] for file in files_of(name)})
        names = ", ".join(f"`{name}`" for name in names_of[key])
        link = f"[{key}](https://arxiv.org/abs/{key})"
        lines.append(f"| {author}: {title} | {link} | {confirmed(key)} | {names} | {', '.join(files)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
