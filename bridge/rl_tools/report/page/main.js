// The page: its head, its sections, its theme, and how it looks for a newer one of itself.

function tile(value, title) { return el("div", { class: "tile" }, el("b", {}, value), el("span", {}, title)); }
// A loop of one's own gives its numbers any names, and a name any number.
const rounded = (value) => typeof value === "number" ? String(Number(value.toPrecision(3))) : "–";
function head() {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const set = (theme) => { document.documentElement.dataset.theme = theme; };
  const button = el("button", { type: "button", onclick: () => {
    const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    kept.set("theme", next);
    set(next);
  } }, "Light / dark");
  set(kept.get("theme", dark.matches ? "dark" : "light"));
  dark.addEventListener("change", () => { if (!kept.get("theme", null)) set(dark.matches ? "dark" : "light"); });
  const runs = content.runs, one = runs.length === 1 ? runs[0] : null, unfinished = runs.filter((run) => !run.finished);
  const made = new Date(content.made * 1000);
  const state = !runs.length ? "a study" : unfinished.length ? `${unfinished.length} of ${runs.length} unfinished; the last record is from ${new Date(Math.max(...unfinished.map((run) => run.time || 0)) * 1000).toLocaleString()}` : runs.length > 1 ? `all ${runs.length} runs have ended` : "the run has ended";
  const tiles = [];
  if (one) {
    const { summary } = one;
    if (summary.accuracy_before !== undefined) tiles.push(tile(`${rounded(summary.accuracy_before)} → ${rounded(summary.accuracy_after)}`, "held out, before → after"));
    if (summary.gain && summary.gain.mean !== undefined) tiles.push(tile(`${rounded(summary.gain.mean)}`, `gain, 95 % [${rounded(summary.gain.low)}, ${rounded(summary.gain.high)}] over held-out rows`));
    tiles.push(tile(`${one.stage} ${one.step}`, "last step"), tile(duration(one.seconds), "time"), tile(compact(one.tokens), "tokens trained on"));
    if (typeof summary.parameters === "number") tiles.push(tile(compact(summary.parameters), "parameters"));
  } else {
    const ended = runs.filter((run) => run.summary.accuracy_before !== undefined);
    for (const run of ended.slice(0, 8)) tiles.push(tile(`${rounded(run.summary.accuracy_before)} → ${rounded(run.summary.accuracy_after)}`, [shown(run.name), ": held out, before → after"].flat()));
    if (runs.length) tiles.push(tile(String(runs.length), "runs"), tile(duration(runs.reduce((sum, run) => sum + (run.seconds || 0), 0)), "time together"));
    for (const study of content.studies) tiles.push(tile(String(study.trials.length), [shown(study.name), ": trials"].flat()));
  }
  const named = (run, text) => (one ? shown(text) : [el("b", {}, shown(run.name)), ": ", ...shown(text)]);
  const told = runs.flatMap((run) => run.warnings.map((text) => named(run, text)));
  const rows = runs.flatMap((run) => run.rows.map((text) => el("p", { class: "soft" }, named(run, `rows of ${text}`))));
  filled(document.getElementById("top"), {}, [el("div", { class: "head" }, el("div", {}, el("h1", {}, shown(content.title)),
    el("p", { class: "soft" }, `${state}. Written ${made.toLocaleString()}.`)), button),
  el("div", { class: "tiles" }, tiles), rows,
  told.length ? el("div", { class: "warnings", role: "note" }, el("b", {}, told.length === 1 ? "One thing to look at" : `${told.length} things to look at`), el("ul", {}, told.map((text) => el("li", {}, text)))) : null]);
}
function foot() {
  const versions = content.runs.map((run) => run.versions).find((found) => Object.keys(found).length) || {};
  document.body.append(el("footer", {}, `rl-fn report. ${Object.entries(versions).map(([name, text]) => `${name} ${text}`).join(", ")}`));
}
head();
const ofRuns = content.runs.length ? [curvesSection(), comparisonSection(), equationSection(), tokensSection(), samplesSection(), slowestSection(), memorySection(), optionsSection()] : [];
const sections = [...ofRuns, studiesSection()].filter((one) => one !== null);
document.getElementById("main").append(...sections);
document.getElementById("sections").append(el("ul", {}, sections.map((one) => el("li", {}, el("a", { href: `#${one.id}` }, one.id[0].toUpperCase() + one.id.slice(1))))));
foot();
if (content.reload) {
  const follow = check(`follow the run (every ${number(content.reload)} s)`, "follow", true, () => {});
  document.querySelector("#top .head").append(follow.node);
  window.setInterval(() => { if (follow.value()) window.location.reload(); }, content.reload * 1000);
}
