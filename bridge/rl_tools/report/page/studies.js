// A tuning study: history, slices, parallel coordinates, importance, the front, and all trials.

const PLOT = { left: 52, right: 12, top: 10, bottom: 30 };

// Text of a picture has no elements in it: odd characters become a mark, and what is long is cut.
function plain(text, most) {
  const safe = [...String(text)].map((character) => ODD.test(character) ? "\ufffd" : character);
  return most && safe.length > most ? `${safe.slice(0, most - 1).join("")}…` : safe.join("");
}
function frame(title, width, height, draw) {
  const node = svg("svg", { class: "plot study", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": plain(title) });
  node.style.maxWidth = `${width * 1.25}px`;
  draw(node);
  return el("figure", { class: "panel" }, el("figcaption", {}, el("div", {}, shown(title))), node);
}
function axes(node, width, height, xs, ys, xTicks) {
  const spread = (low, high) => low === high ? [low - (Math.abs(low) || 1) * 0.05, high + (Math.abs(high) || 1) * 0.05] : [low - (high - low) * 0.06, high + (high - low) * 0.06];
  const [xLow, xHigh] = spread(Math.min(...xs), Math.max(...xs)), [yLow, yHigh] = spread(Math.min(...ys), Math.max(...ys));
  const x = scale(xLow, xHigh, PLOT.left, width - PLOT.right), y = scale(yLow, yHigh, height - PLOT.bottom, PLOT.top);
  for (const value of ticks(yLow, yHigh, 4)) {
    node.append(svg("line", { class: "grid", x1: PLOT.left, x2: width - PLOT.right, y1: y(value), y2: y(value) }),
      svg("text", { x: PLOT.left - 6, y: y(value) + 4, "text-anchor": "end" }, compact(value)));
  }
  for (const [value, text] of xTicks || ticks(xLow, xHigh, 5).map((one) => [one, compact(one)])) {
    const anchor = x(value) > width - 40 ? "end" : x(value) < PLOT.left + 14 ? "start" : "middle";
    node.append(svg("text", { x: x(value), y: height - 10, "text-anchor": anchor }, plain(text, 16)));
  }
  return { x, y };
}
function dot(x, y, trial, goal, place, hollow) {
  const value = trial.values[goal];
  const told = `trial ${trial.number}: ${goal} ${number(value.mean)}${Object.entries(trial.assignment).map(([name, text]) => `, ${name} ${text}`).join("")}`;
  return svg("circle", { cx: x, cy: y, r: 4, stroke: color(place), fill: hollow ? "none" : color(place), "fill-opacity": 0.8 }, svg("title", {}, plain(told, 400)));
}
function overTrials(study, goal) {
  const trials = study.trials.filter((trial) => trial.values[goal.name]);
  return frame(`${goal.name} over trials`, 360, 220, (node) => {
    const ends = trials.flatMap((trial) => Object.values(trial.values[goal.name])).filter((value) => value !== null);
    const { x, y } = axes(node, 360, 220, trials.map((trial) => trial.number), ends.length ? ends : [0]);
    let best = null, path = "";
    for (const trial of trials) {
      const { mean, low, high } = trial.values[goal.name];
      if (low !== null && high !== null) node.append(svg("line", { x1: x(trial.number), x2: x(trial.number), y1: y(low), y2: y(high), stroke: color(0), "stroke-width": 1.5 }));
      node.append(dot(x(trial.number), y(mean), trial, goal.name, 0, !trial.feasible));
      if (trial.feasible && trial.status === "complete" && (best === null || (goal.maximize ? mean > best : mean < best))) {
        path += best === null ? `M${x(trial.number)},${y(mean)}` : `H${x(trial.number)}V${y(mean)}`;
        best = mean;
      }
    }
    if (path) node.append(svg("path", { d: `${path}H${360 - PLOT.right}`, fill: "none", stroke: color(1), "stroke-width": 2 }));
  });
}
function slice(study, goal, parameter, place) {
  const trials = study.trials.filter((trial) => trial.values[goal.name] && trial.places[place] !== null);
  if (!trials.length) return null;
  const steps = parameter.choices.length - 1;
  const marks = parameter.choices.length ? parameter.choices.map((text, at) => [at / Math.max(1, steps), text]) : [[0, parameter.ends[0]], [1, parameter.ends[1]]];
  return frame(`${goal.name} by ${parameter.name}`, 360, 220, (node) => {
    const { x, y } = axes(node, 360, 220, [0, 1], trials.map((trial) => trial.values[goal.name].mean), marks);
    for (const trial of trials) node.append(dot(x(trial.places[place]), y(trial.values[goal.name].mean), trial, goal.name, 0, !trial.feasible));
  });
}
function parallel(study, goal) {
  const trials = study.trials.filter((trial) => trial.values[goal.name]), columns = study.parameters.length + 1;
  const means = trials.map((trial) => trial.values[goal.name].mean), low = Math.min(...means), high = Math.max(...means);
  const width = Math.max(360, 130 * columns), height = 250;
  const figure = frame(`all parameters, and ${goal.name}`, width, height, (node) => {
    const x = (column) => 50 + column * (width - 100) / (columns - 1), y = (share) => height - 40 - share * (height - 70);
    const names = [...study.parameters, { name: goal.name, ends: [number(low), number(high)] }];
    names.forEach((one, column) => node.append(svg("line", { class: "axis", x1: x(column), x2: x(column), y1: y(0), y2: y(1) }),
      svg("text", { x: x(column), y: height - 6, "text-anchor": "middle" }, plain(one.name.split(".").at(-1), 18)),
      svg("text", { x: x(column), y: y(0) + 14, "text-anchor": "middle" }, plain(one.ends[0], 14)), svg("text", { x: x(column), y: y(1) - 6, "text-anchor": "middle" }, plain(one.ends[1], 14))));
    trials.forEach((trial, at) => {
      const share = (means[at] - low) / (high - low || 1), good = goal.maximize ? share : 1 - share;
      const points = [...trial.places, share].map((value, column) => value === null ? null : `${x(column)},${y(value)}`).filter((one) => one !== null);
      node.append(svg("path", { d: `M${points.join("L")}`, fill: "none", stroke: color(0), opacity: 0.15 + 0.8 * good * good, "stroke-width": 0.8 + 1.8 * good * good },
        svg("title", {}, `trial ${trial.number}: ${goal.name} ${number(means[at])}`)));
    });
  });
  figure.classList.add("full");
  return figure;
}
function importance(study) {
  const shares = Object.entries(study.importance.shares);
  if (!shares.length) return study.importance.reason ? el("p", { class: "soft small" }, `Importance: ${study.importance.reason}.`) : null;
  return [el("h3", {}, "Importance"), table(["parameter", numeric("share"), ""], shares.map(([name, share]) => {
    const bar = el("span", { class: "bar" });
    bar.style.width = `${100 * share}%`;
    return el("tr", {}, el("td", { class: "mono" }, shown(name)), el("td", { class: "number" }, number(share)), el("td", { class: "free" }, bar));
  })), el("p", { class: "soft small" }, study.importance.method)];
}
function front(study) {
  const [first, second] = study.goals, trials = study.trials.filter((trial) => second && trial.values[first.name] && trial.values[second.name]);
  if (!trials.length) return null;
  return frame(`${second.name} over ${first.name}: filled ones are on the front`, 360, 220, (node) => {
    const { x, y } = axes(node, 360, 220, trials.map((trial) => trial.values[first.name].mean), trials.map((trial) => trial.values[second.name].mean));
    for (const trial of trials) node.append(dot(x(trial.values[first.name].mean), y(trial.values[second.name].mean), trial, first.name, trial.on_front ? 1 : 0, !trial.on_front));
  });
}
function studiesSection() {
  if (!content.studies.length) return null;
  return section("studies", "Tuning", content.studies.map((study) => {
    const goal = study.goals[0], there = study.trials.some((trial) => trial.values[goal.name]), names = study.parameters.map((one) => one.name);
    return [el("h3", {}, shown(study.name)), el("ul", {}, study.said.map((line) => el("li", {}, shown(line)))),
      there ? el("div", { class: "panels" }, overTrials(study, goal), front(study), study.parameters.map((one, place) => slice(study, goal, one, place)),
        study.parameters.length ? parallel(study, goal) : null) : null,
      importance(study),
      el("h3", {}, "Trials"), table([numeric("trial"), "status", ...study.goals.map((one) => numeric(one.name)), numeric("time"), ...names], study.trials.map((trial) => el("tr", {},
        el("td", { class: "number" }, String(trial.number)), el("td", {}, trial.status, trial.feasible || trial.status !== "complete" ? null : " (a constraint is broken)",
          trial.reason ? el("div", { class: "soft small" }, shown(trial.reason)) : null),
        study.goals.map((one) => el("td", { class: "number" }, trial.values[one.name] ? interval(trial.values[one.name]) : "–")),
        el("td", { class: "number" }, duration(trial.seconds)), names.map((name) => el("td", { class: "mono" }, shown(trial.assignment[name] === undefined ? "–" : trial.assignment[name]))))), true)];
  }));
}
