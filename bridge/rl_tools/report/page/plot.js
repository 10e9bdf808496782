// One chart: lines and bands over an axis, with the values at the pointer or at the arrow keys.
// A line is {label, place, x, y, mean?, low?, high?, before?, thin?}; places give colour and dashes. mean is the running
// mean of all that was recorded, of which x and y have the extremes; before is a level from before the first point.

const HEIGHT = 190;

function extent(lines, names, positive) {
  let low = Infinity, high = -Infinity;
  for (const line of lines) {
    for (const name of names) {
      for (const value of [line[name] ?? []].flat()) {
        if (value === null || (positive && value <= 0)) continue;
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
  }
  return [low, high];
}
function path(xs, ys, x, y, positive) {
  let text = "", open = false;
  xs.forEach((at, place) => {
    const value = ys[place];
    const there = at !== null && value !== null && (!positive.x || at > 0) && (!positive.y || value > 0);
    if (there) text += `${open ? "L" : "M"}${x(at).toFixed(1)},${y(value).toFixed(1)}`;
    open = there;
  });
  return text;
}
function area(line, x, y, positive, floor) {
  const places = line.x.map((_, place) => place).filter((place) => line.low[place] !== null && line.high[place] !== null
    && line.x[place] !== null && (!positive.x || line.x[place] > 0) && (!positive.y || line.high[place] > 0));
  if (places.length < 2) return "";
  const under = (value) => positive.y && value <= 0 ? floor : y(value);
  const up = places.map((place) => `${x(line.x[place]).toFixed(1)},${y(line.high[place]).toFixed(1)}`);
  const down = places.map((place) => `${x(line.x[place]).toFixed(1)},${under(line.low[place]).toFixed(1)}`).reverse();
  return `M${up.join("L")}L${down.join("L")}Z`;
}
function draw(node, width, lines, options) {
  const positive = { x: options.logX, y: options.logY };
  const [xLow, xHigh] = extent(lines, ["x"], positive.x);
  let [low, high] = extent(lines, ["y", "low", "high", "before"], positive.y);
  node.replaceChildren();
  node.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  if (!(low <= high) || !(xLow <= xHigh)) {
    node.append(svg("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "no positive value to draw"));
    return null;
  }
  if (!positive.y) {
    const room = (high - low || Math.abs(high) || 1) * 0.04;
    [low, high] = [low - (low === 0 ? 0 : room), high + room];
  } else if (low === high) { [low, high] = [low / 2, high * 2]; }
  const yTicks = ticks(low, high, 4, positive.y).map((value) => [value, compact(value)]);
  const left = 12 + 6.6 * Math.max(2, ...yTicks.map(([, text]) => text.length)), right = width - 12, bottom = HEIGHT - 24;
  const x = scale(xLow, xHigh, left, right, positive.x), y = scale(low, high, bottom, 8, positive.y);
  for (const [value, text] of yTicks) {
    node.append(svg("line", { class: "grid", x1: left, x2: right, y1: y(value), y2: y(value) }),
      svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, text));
  }
  for (const value of ticks(xLow, xHigh, Math.max(2, Math.floor(width / 85)), positive.x)) {
    const end = x(value) > right - 14;
    node.append(svg("text", { x: end ? right + 6 : x(value), y: HEIGHT - 8, "text-anchor": end ? "end" : "middle" }, compact(value)));
  }
  node.append(svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
  for (const line of lines.filter((one) => one.low && one.high)) {
    node.append(svg("path", { d: area(line, x, y, positive, bottom), fill: color(line.place), opacity: 0.16 }));
  }
  for (const line of lines) {
    const style = { fill: "none", stroke: color(line.place), "stroke-linejoin": "round", "stroke-dasharray": line.thin ? null : DASHES[line.place % 8] };
    const smooth = smoothing(line, options);
    if (typeof line.before === "number" && !(positive.y && line.before <= 0)) {
      node.append(svg("line", { class: "before", x1: left, x2: right, y1: y(line.before), y2: y(line.before), stroke: color(line.place), "stroke-dasharray": "4 4", opacity: 0.6 },
        svg("title", {}, `before: ${number(line.before)}`)));
    }
    const raw = { ...style, "stroke-width": line.thin || smooth ? 1 : 1.8, opacity: line.thin || smooth ? 0.33 : 1 };
    if (smooth) raw["stroke-dasharray"] = null;
    node.append(svg("path", { d: path(line.x, line.y, x, y, positive), ...raw }));
    if (smooth) node.append(svg("path", { d: path(line.x, line.mean, x, y, positive), ...style, "stroke-width": 2.2 }));
    if (line.y.length <= 16) {
      line.x.forEach((at, place) => {
        const value = line.y[place];
        if (at !== null && value !== null && (!positive.x || at > 0) && (!positive.y || value > 0)) {
          node.append(svg("circle", { cx: x(at), cy: y(value), r: 2.6, fill: color(line.place) }));
        }
      });
    }
  }
  return { x, y, left, right, bottom, positive };
}
const smoothing = (line, options) => Boolean(options.smooth && !line.thin && line.mean);
function nearest(line, at, x) {
  let best = -1, distance = Infinity;
  line.x.forEach((value, place) => {
    const gap = value === null || line.y[place] === null ? Infinity : Math.abs(x(value) - at);
    if (gap < distance) { distance = gap; best = place; }
  });
  return best;
}
function chart(title, lines, options) {
  const node = svg("svg", { class: "plot", tabindex: 0, role: "img" });
  const last = el("span", {});
  const tip = el("div", { class: "tip", role: "status", hidden: true });
  const figure = el("figure", { class: "panel" }, el("figcaption", {}, el("div", {}, title), last), node, tip);
  let drawn = null, mark = null, at = null, now = lines;
  function redraw(next) {
    now = next || now;
    const width = Math.max(240, figure.clientWidth - 20);
    drawn = draw(node, width, now, options());
    const main = now.filter((line) => !line.thin);
    const ends = main.map((line) => (smoothing(line, options()) ? line.mean : line.y).findLast((value) => value !== null));
    last.textContent = ends.length === 1 ? number(ends[0]) : "";
    node.setAttribute("aria-label", `${title}: ${main.map((line, place) => `${line.label} ends at ${number(ends[place])}`).join(", ")}. Arrow keys read values.`);
    hide();
  }
  function hide() { tip.hidden = true; if (mark) mark.remove(); mark = null; at = null; }
  function show(pixels) {
    if (!drawn || !now.length) return;
    const found = now.map((line) => [line, nearest(line, pixels, drawn.x)]).filter(([, place]) => place >= 0);
    if (!found.length) return;
    const closest = found.reduce((best, pair) => {
      const gap = ([line, place]) => Math.abs(drawn.x(line.x[place]) - pixels);
      return gap(pair) < gap(best) ? pair : best;
    });
    at = drawn.x(closest[0].x[closest[1]]);
    if (mark) mark.remove();
    mark = svg("g", {}, svg("line", { class: "cursor", x1: at, x2: at, y1: 6, y2: drawn.bottom }));
    for (const [line, place] of found) {
      const value = line.y[place];
      if (drawn.positive.y && value <= 0) continue;
      mark.append(svg("circle", { cx: drawn.x(line.x[place]), cy: drawn.y(value), r: 3.4, fill: color(line.place) }));
    }
    node.append(mark);
    const rows = found.slice(0, 12).map(([line, place]) => el("tr", {}, el("td", {}, swatch(line.place)),
      el("td", { class: "name" }, line.label), el("td", {}, number(line.y[place])),
      el("td", { class: "soft" }, line.low && line.low[place] !== null ? `${number(line.low[place])} … ${number(line.high[place])}` : "")));
    tip.replaceChildren(el("div", { class: "soft" }, `${options().unit} ${number(closest[0].x[closest[1]])}`), el("table", {}, rows));
    tip.hidden = false;
    const onLeft = at > (drawn.left + drawn.right) / 2;
    tip.style.left = onLeft ? "0.6rem" : "auto";
    tip.style.right = onLeft ? "auto" : "0.6rem";
  }
  function key(event) {
    const line = now.find((one) => !one.thin) || now[0];
    if (!drawn || !line || !["ArrowLeft", "ArrowRight", "Home", "End", "Escape"].includes(event.key)) return;
    event.preventDefault();
    if (event.key === "Escape") { hide(); return; }
    const places = line.x.map((_, place) => place).filter((place) => line.y[place] !== null && (!drawn.positive.x || line.x[place] > 0));
    const here = at === null ? -1 : places.indexOf(nearest(line, at, drawn.x));
    const next = { Home: 0, End: places.length - 1, ArrowLeft: Math.max(0, here - 1), ArrowRight: Math.min(places.length - 1, here + 1) };
    if (places.length) show(drawn.x(line.x[places[next[event.key]]]));
  }
  node.addEventListener("pointermove", (event) => {
    const box = node.getBoundingClientRect();
    show((event.clientX - box.left) * (node.viewBox.baseVal.width / box.width));
  });
  node.addEventListener("pointerleave", hide);
  node.addEventListener("blur", hide);
  node.addEventListener("keydown", key);
  return { figure, redraw };
}
// Charts are drawn when they come near the window: a page of hundreds opens at once.
const waiting = new Map();
const near = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    near.unobserve(entry.target);
    const redraw = waiting.get(entry.target);
    waiting.delete(entry.target);
    redraw();
  }
}, { rootMargin: "500px" });
function later(made) { waiting.set(made.figure, made.redraw); near.observe(made.figure); }
function drawAll() { for (const [figure, redraw] of waiting) { near.unobserve(figure); redraw(); } waiting.clear(); }
window.addEventListener("beforeprint", drawAll);
