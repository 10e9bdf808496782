// Everything that is no curve: the comparison, the equation, samples, slow steps, memory, options.

function table(heads, rows, wide) {
  return el("div", { class: `scroll${wide ? " tall" : ""}`, tabindex: 0, role: "region", "aria-label": "Table" },
    el("table", { class: "data" }, el("thead", {}, el("tr", {}, heads.map((head) => typeof head === "string" ? el("th", { scope: "col" }, head) : head))),
      el("tbody", {}, rows)));
}
const numeric = (text) => el("th", { class: "number", scope: "col" }, text);
const interval = (entry) => (entry.low ?? null) === null ? number(entry.mean) : `${number(entry.mean)} [${number(entry.low)}, ${number(entry.high)}]`;

function comparisonSection() {
  const stages = Object.entries(content.comparison).filter(([, found]) => found && found.rows.length);
  if (!stages.length) return null;
  return section("comparison", "Comparison", stages.map(([stage, found]) => [
    el("h3", {}, `${stage}, at step ${found.step}`),
    table(["metric", ...content.groups.map((group, place) => el("th", { class: "number", scope: "col" }, swatch(place), " ", shown(group.label)))],
      found.rows.map((row) => el("tr", {}, el("td", {}, words(row.name)), row.groups.map((entry) => el("td", { class: "number" }, interval(entry),
        entry.difference ? el("div", { class: "soft small" }, `Δ ${interval(entry.difference)}`) : null)))), true)]),
    el("p", { class: "soft small" }, "A metric of every step is its mean over the last tenth of the steps; of few steps, its last value. Intervals are 95 % intervals (Student's t) over the runs of a group, from three runs on; Δ is the difference to the first group, paired by seed. They cover the choice of the seed."));
}

const KINDS = { text: (text) => text, var: (text) => el("i", {}, text), code: (text) => el("code", {}, text),
  sub: (text) => el("sub", {}, text), sup: (text) => el("sup", {}, text) };
const equationBlock = (lines) => el("div", { class: "equation", role: "math" },
  lines.map((line) => el("span", {}, line.map(([kind, text]) => KINDS[kind](text)))));

function equationSection() {
  if (!content.equations.length) return null;
  return section("equation", "Equation", content.equations.map((one) => [
    content.equations.length > 1 || content.groups.length > 1 ? el("p", {}, one.groups.map((place) => [swatch(place), " ", shown(labelOf(place)), " "])) : null,
    el("p", {}, el("b", {}, one.name), ". ", one.about),
    one.optimised.length ? equationBlock(one.optimised) : equationBlock(one.published),
    el("p", { class: "soft small" }, Object.entries(one.constants).map(([name, value], place) => [place ? ", " : "Constants: ", el("code", {}, `${name}=${value}`)]))]));
}

function samplesSection() {
  const runs = content.samples.map((one, run) => [String(run), content.runs[run].name]).filter(([run]) => Object.keys(content.samples[run]).length);
  if (!runs.length) return null;
  const box = el("div", {});
  const run = choice("Run", "sampleRun", runs, runs[0][0], build);
  const kinds = [...new Set(content.samples.flatMap((one) => Object.keys(one)))];
  const how = choice("Drawn", "sampleHow", kinds.map((name) => [name, name]), kinds[0], build);
  const told = (one) => one === null ? [el("td", { class: "soft" }, "–"), el("td", { class: "number soft" }, "–")]
    : [el("td", { class: "free mono" }, el("bdi", {}, shown(one.completion))), el("td", { class: "number" }, shown(Object.values(one.rewards).map((value) => typeof value === "string" ? value : number(value)).join(" · ")))];
  function build() {
    const rows = content.samples[run.value()][how.value()] || [];
    box.replaceChildren(table(["prompt", "answer", "before", numeric("reward"), "after", numeric("reward")], rows.map((row) => el("tr", {},
      el("td", { class: "free mono" }, el("bdi", {}, shown(row.prompt))), el("td", { class: "mono" }, row.answer === null ? "–" : el("bdi", {}, shown(row.answer))),
      told(row.before), told(row.after))), true));
  }
  build();
  return section("samples", "Held-out samples before and after", el("div", { class: "controls" }, runs.length > 1 ? run.node : null, kinds.length > 1 ? how.node : null), box);
}

function slowestSection() {
  const all = content.slowest.flatMap((found, run) => found.rows.map((row) => ({ ...row, run, median: found.medians[row.stage] })));
  if (!all.length) return null;
  all.sort((a, b) => b.seconds - a.seconds);
  const top = all.slice(0, 12), phases = [...new Set(top.flatMap((row) => Object.keys(row.phases)))];
  const rows = top.map((row) => {
    const bar = el("span", { class: "bar" });
    bar.style.width = `${100 * row.seconds / top[0].seconds}%`;
    return el("tr", {}, content.runs.length > 1 ? el("td", {}, shown(content.runs[row.run].name)) : null, el("td", { class: "whole" }, `${row.stage} ${row.step}`),
      el("td", { class: "number" }, duration(row.seconds)), el("td", { class: "number" }, row.median ? `${Number((row.seconds / row.median).toPrecision(2))}×` : "–"),
      el("td", { class: "number" }, number(row.tokens)), phases.map((name) => el("td", { class: "number" }, row.phases[name] === undefined ? "–" : duration(row.phases[name]))),
      el("td", {}, row.evaluated ? "evaluated" : ""), el("td", { class: "free" }, bar));
  });
  return section("slowest", "Slowest steps", table([content.runs.length > 1 ? "run" : null, "step", numeric("time"), numeric("of the median"), numeric("tokens"),
    ...phases.map((name) => numeric(words(name))), "", ""].filter((head) => head !== null), rows),
  el("p", { class: "soft small" }, "A step's time is that since the record before it, a checkpoint or an evaluation in between included."));
}

function memorySection() {
  const there = content.memory.map((found, run) => [found, run]).filter(([found]) => found);
  if (!there.length) return null;
  return section("memory", "Memory", there.map(([found, run]) => {
    const grid = el("div", { class: "panels" });
    for (const one of found.charts) {
      const lines = Object.entries(one.columns).map(([name, y], place) => ({ label: words(name), place, x: one.x, y }));
      const made = chart(`${one.title}, MiB`, lines, () => ({ logX: false, logY: false, smooth: false, unit: one.unit }));
      made.figure.append(el("ul", { class: "legend" }, lines.map((line) => el("li", { class: "small" }, swatch(line.place), " ", line.label))));
      grid.append(made.figure);
      later(made);
    }
    const peaks = found.peaks.length ? [el("h3", {}, "Largest peak of each phase"), table(["phase", "call", numeric("step"), numeric("peak, MiB"), "allocated by"], found.peaks.map((row) => el("tr", {},
      el("td", {}, shown(row.phase)), el("td", { class: "mono" }, shown(row.call)), el("td", { class: "number" }, number(row.step)), el("td", { class: "number" }, number(row.peak)),
      el("td", { class: "mono free" }, row.line === null ? "–" : shown(row.line)))))] : null;
    return [content.runs.length > 1 ? el("h3", {}, shown(content.runs[run].name)) : null, grid, peaks];
  }));
}

function optionsSection() {
  const names = [...new Set(content.options.flatMap((one) => Object.keys(one)))], differing = new Set(content.differing);
  const box = el("div", {});
  const only = check("only what differs", "onlyDiffering", content.differing.length > 0, build);
  const filter = el("input", { type: "search", placeholder: "name or value", "aria-label": "Show options with this in their name or value", oninput: build });
  function build() {
    const wanted = names.filter((name) => (!only.value() || differing.has(name))
      && (name.includes(filter.value.trim()) || content.options.some((one) => (one[name] || "").includes(filter.value.trim()))));
    box.replaceChildren(wanted.length ? table(["option", ...content.runs.map((run) => el("th", { scope: "col" }, shown(run.name)))],
      wanted.map((name) => el("tr", { class: differing.has(name) && content.options.length > 1 ? "differs" : null }, el("td", { class: "mono" }, name),
        content.options.map((one) => el("td", { class: "mono free" }, one[name] === undefined ? "–" : el("bdi", {}, shown(one[name])))))), true)
      : el("p", { class: "soft" }, "No option."));
  }
  build();
  return section("options", "Options", el("div", { class: "controls" }, content.runs.length > 1 ? only.node : null, filter), box);
}
