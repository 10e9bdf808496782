// The panels of a stage: a line a run, or a mean with its band a group of runs.

const CLOCKS = [["step", "step"], ["tokens", "tokens trained on"], ["seconds", "seconds"], ["version", "weights version"]];

function pointsOf(line, clock) {
  const places = line.at || line.y.map((_, place) => place);
  return { x: places.map((place) => clock[place]), y: line.y, mean: line.mean, low: line.low, high: line.high };
}
function linesOf(stage, panel, clock, view) {
  const found = [];
  content.groups.forEach((group, place) => {
    if (!view.groups[place]) return;
    const mean = panel.bands[place];
    const levels = group.counted.map((run) => panel.before[run]).filter((value) => value !== undefined);
    const before = levels.length === group.counted.length ? levels.reduce((sum, value) => sum + value, 0) / levels.length : null;
    if (mean) found.push({ label: `mean of ${group.counted.length}`, place, before, ...pointsOf(mean, stage.group_clocks[place][clock]) });
    for (const run of group.runs) {
      const line = panel.lines[run];
      if (!line || (mean && !view.each)) continue;
      const points = pointsOf(line, stage.clocks[run][clock]);
      found.push(mean ? { label: content.runs[run].name, place, x: points.x, y: points.y, thin: true }
        : { label: content.runs[run].name, place, before: panel.before[run] ?? null, ...points });
    }
  });
  if (content.groups.length > 1) found.forEach((line) => { if (!line.thin && line.label.startsWith("mean")) line.label = content.groups[line.place].short; });
  return found;
}
const labelOf = (place) => content.groups[place].label;

function curvesSection() {
  const stages = Object.keys(content.stages);
  const panels = el("div", {});
  const view = { groups: content.groups.map(() => true) };
  let made = [];
  const redraw = () => { made.forEach((one) => { if (!waiting.has(one.chart.figure)) one.chart.redraw(one.lines()); }); };
  const stage = choice("Stage", "stage", stages.map((name) => [name, name]), stages[stages.length - 1], build);
  const clock = choice("Over", "clock", CLOCKS, "step", redraw);
  const logX = check("log x", "logX", false, redraw), logY = check("log y", "logY", false, redraw);
  const smooth = check("running mean", "smooth", true, redraw);
  const several = content.groups.some((group) => group.runs.length > 1);
  const each = check("each run", "each", false, redraw);
  const filter = el("input", { type: "search", placeholder: "name of a metric", "aria-label": "Show metrics with this in their name", oninput: build });
  const options = () => ({ logX: logX.value(), logY: logY.value(), smooth: smooth.value(),
    unit: CLOCKS.find(([name]) => name === clock.value())[1] });
  function build() {
    const shownStage = content.stages[stage.value()];
    waiting.clear();
    made = [];
    panels.replaceChildren();
    const wanted = shownStage.panels.filter((panel) => words(panel.name).includes(words(filter.value.trim().toLowerCase())));
    for (const title of [...new Set(wanted.map((panel) => panel.section))]) {
      const grid = el("div", { class: "panels" });
      panels.append(el("h3", {}, title), grid);
      for (const panel of wanted.filter((one) => one.section === title)) {
        const lines = () => linesOf(shownStage, panel, clock.value(), { ...view, each: each.value() });
        const drawn = chart(words(panel.name), lines(), () => ({ ...options(), smooth: smooth.value() && panel.name !== "learning_rate" }));
        const one = { chart: drawn, lines };
        made.push(one);
        grid.append(drawn.figure);
        later({ figure: drawn.figure, redraw: () => drawn.redraw(lines()) });
      }
    }
    if (!wanted.length) panels.append(el("p", { class: "soft" }, "No metric has this name."));
  }
  const legend = el("ul", { class: "legend" }, content.groups.map((group, place) => {
    const box = el("input", { type: "checkbox", checked: true, onchange: () => { view.groups[place] = box.checked; redraw(); } });
    return el("li", {}, el("label", {}, box, swatch(place), shown(group.label)));
  }));
  build();
  let width = window.innerWidth;
  window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; redraw(); } });
  const note = several ? el("p", { class: "soft small" }, "Bands are 95 % intervals of the mean (Student's t) over three or more runs that differ in their seed alone; of one run's held-out score, bootstrap intervals over its rows.") : null;
  return section("curves", "Curves", el("div", { class: "controls" }, stages.length > 1 ? stage.node : null, clock.node,
    logX.node, logY.node, smooth.node, several ? each.node : null, filter), content.groups.length > 1 || several ? legend : null, note, panels);
}
