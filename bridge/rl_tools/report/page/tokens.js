// Completions over time: every token coloured by one of its numbers, all of its numbers where the pointer or focus is.

const COLOURS = {
  advantage: { title: "advantage", two: true, of: (tokens, place) => tokens.advantage[place] },
  ratio: { title: "log ratio π/π_old", two: true, of: (tokens, place) => tokens.ratio[place] === null ? null : Math.log(tokens.ratio[place]) },
  entropy: { title: "entropy", two: false, of: (tokens, place) => tokens.entropy[place] },
  mismatch: { title: "mismatch log π_old/μ", two: true, of: (tokens, place) => tokens.old_logprob[place] === null || tokens.rollout_logprob[place] === null ? null : tokens.old_logprob[place] - tokens.rollout_logprob[place] },
  surprise: { title: "surprise −log π_old", two: false, of: (tokens, place) => tokens.old_logprob[place] === null ? null : -tokens.old_logprob[place] },
};
const NUMBERS = [["id", "token id"], ["place", "place"], ["logprob", "log-prob"], ["old_logprob", "old log-prob"],
  ["rollout_logprob", "rollout log-prob"], ["ratio", "ratio"], ["advantage", "advantage"], ["entropy", "entropy"], ["version", "weights version"]];

function tokensSection() {
  const runs = content.completions.map((one, run) => [String(run), content.runs[run].name]).filter(([run]) => content.completions[run].steps.length);
  if (!runs.length) return null;
  const cards = el("div", { class: "cards" }), legend = el("span", { class: "scale" });
  const numbers = el("div", { class: "numbers", "aria-live": "polite" });
  const where = el("output", {});
  const run = choice("Run", "tokenRun", runs, runs[0][0], () => { slide(); build(); });
  const by = choice("Colour by", "colour", Object.entries(COLOURS).map(([name, one]) => [name, one.title]), "advantage", build);
  const range = el("input", { type: "range", min: 0, step: 1, "aria-label": "Step", oninput: () => { kept.set("tokenStep", range.value); build(); } });
  const steps = () => content.completions[run.value()].steps;
  function slide() { range.max = steps().length - 1; range.value = kept.get("tokenStep", range.max); }
  const move = (by_) => { range.value = Number(range.value) + by_; kept.set("tokenStep", range.value); build(); };

  function tell(tokens, place) {
    if (tokens === null) {
      numbers.replaceChildren(el("p", { class: "soft small" }, "Point at a token, or press Tab and the arrow keys, for its numbers as the loss had them."));
      return;
    }
    const cells = [["token", [el("span", { class: "mono" }, tokens.text[place] === "" ? "(empty)" : shown(JSON.stringify(tokens.text[place])))]],
      ...NUMBERS.map(([name, title]) => [title, name === "version" && tokens.version[place] < 0 ? "given" : number(tokens[name][place])])];
    numbers.replaceChildren(el("dl", {}, cells.map(([title, value]) => el("div", {}, el("dt", {}, title), el("dd", {}, value)))));
  }
  function strip(sample, colour, largest) {
    const tokens = sample.tokens;
    const box = el("div", { class: "tokens mono", tabindex: 0, role: "group", "aria-label": "Completion; arrow keys go from token to token" });
    let here = -1;
    const half = tokens.id.length / 2;
    const spans = tokens.id.map((id, place) => {
      const value = tokens.counted[place] ? colour.of(tokens, place) : null;
      const text = tokens.text[place] === "" ? [el("span", { class: "odd" }, `#${id}`)] : shown(tokens.text[place].replaceAll("\n", "↵\n"));
      const span = el("span", { class: `token${value < 0 && colour.two ? " minus" : ""}${tokens.counted[place] ? "" : " given"}` }, text);
      if (value !== null && largest > 0) {
        const strength = 0.75 * Math.min(1, Math.abs(value) / largest);
        const name = colour.two ? (value < 0 ? "--minus" : "--plus") : "--much";
        span.style.backgroundColor = `rgba(var(${name}), ${strength.toFixed(3)})`;
      }
      span.addEventListener("pointerenter", () => { tell(tokens, place); go(place, false); });
      if (sample.left_out && place === half) box.append(el("span", { class: "odd" }, `… ${sample.left_out} tokens …`));
      box.append(span);
      return span;
    });
    function go(place, scroll) {
      if (here >= 0) spans[here].classList.remove("here");
      here = place;
      spans[place].classList.add("here");
      if (scroll) { spans[place].scrollIntoView({ block: "nearest" }); tell(tokens, place); }
    }
    box.addEventListener("keydown", (event) => {
      const next = { ArrowRight: here + 1, ArrowLeft: Math.max(0, here - 1), Home: 0, End: spans.length - 1 }[event.key];
      if (next === undefined || !spans.length) return;
      event.preventDefault();
      go(Math.min(spans.length - 1, next), true);
    });
    return box;
  }
  function build() {
    const line = steps()[Number(range.value)], colour = COLOURS[by.value()];
    where.textContent = `step ${line.step}`;
    // One scale for all steps of the run: a colour means the same from step to step.
    const sizes = steps().flatMap((one) => one.samples.flatMap((sample) => sample.tokens.id.map((_, place) =>
      sample.tokens.counted[place] ? Math.abs(colour.of(sample.tokens, place) || 0) : 0))).sort((a, b) => a - b);
    const largest = sizes.length ? sizes[Math.floor((sizes.length - 1) * 0.98)] || sizes[sizes.length - 1] : 0;
    legend.replaceChildren(colour.two ? `−${number(largest)}` : "0", el("i", { class: colour.two ? "two" : "one" }), number(largest),
      largest === 0 ? " (0 everywhere)" : "");
    tell(null);
    cards.replaceChildren(...line.samples.map((sample) => el("article", { class: "card" },
      el("div", { class: "about" }, el("span", {}, `reward ${number(sample.reward)}`),
        Object.keys(sample.rewards).length > 1 ? Object.entries(sample.rewards).map(([name, value]) => el("span", {}, shown(name), ` ${number(value)}`)) : null,
        el("span", {}, `group ${sample.group}`), el("span", {}, `${sample.tokens.id.length + sample.left_out} tokens`), el("span", {}, `ended by ${sample.finish_reason}`),
        sample.tokens.ratio.every((value) => value === null) ? el("span", {}, "not in an update") : null),
      el("div", { class: "prompt mono" }, shown(sample.prompt)), strip(sample, colour, largest))));
  }
  slide();
  build();
  const left = content.completions.reduce((sum, one) => sum + one.left_out, 0);
  return section("completions", "Completions over time",
    el("div", { class: "controls" }, runs.length > 1 ? run.node : null, by.node, legend,
      el("label", { class: "wide" }, el("button", { type: "button", "aria-label": "Earlier step", onclick: () => move(-1) }, "‹"), range,
        el("button", { type: "button", "aria-label": "Later step", onclick: () => move(1) }, "›"), where)),
    left ? el("p", { class: "soft small" }, `${left} recorded steps are left out for room; completions.jsonl has them all.`) : null, numbers, cards);
}
