"""What a stop text does to completions, worked out from the whole text."""


def naive(tokenizer, tokens, texts):
    """How many tokens there are when a text is complete first, and which text begins first then."""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count], clean_up_tokenization_spaces=False)
        if places := [(text.find(stop), number) for number, stop in enumerate(texts) if stop in text]:
            return count, texts[min(places)[1]]
    return None, None


def assert_cut_at_the_text(tokenizer, plain, found, stop):
    """``found``: the trajectories of ``plain`` with these stop texts. Log-probabilities to rounding."""
    stopped = 0
    for whole, cut in zip(plain, found, strict=True):
        drawn = list(whole.sampled_tokens)
        count, text = naive(tokenizer, drawn, stop)
        stopped += text is not None
        assert list(cut.sampled_tokens) == drawn[:count] and cut.stop_reason == text
        assert cut.finish_reason == ("stop" if text else whole.finish_reason)
        assert cut.completion == (tokenizer.decode(drawn[:count]) if text else whole.completion)
        close = zip(cut.sampled_logprobs, whole.sampled_logprobs, strict=False)
        assert all(abs(a - b) < 1e-5 for a, b in close)
        cut.require_sampled()
    assert stopped > 0
