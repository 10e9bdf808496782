// Numbers to pixels, and the ticks of an axis.

function scale(low, high, from, to, log) {
  if (log) {
    const a = Math.log10(low), b = Math.log10(high);
    return (value) => from + (Math.log10(value) - a) / (b - a || 1) * (to - from);
  }
  return (value) => from + (value - low) / (high - low || 1) * (to - from);
}
function ticks(low, high, count, log) {
  if (log) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
      for (const digit of [1, 2, 5]) found.push(digit * 10 ** power);
    }
    const inside = found.filter((value) => value >= low && value <= high);
    const tens = inside.filter((value) => Math.abs(Math.log10(value) % 1) < 1e-9);
    const wanted = tens.length >= 2 ? tens : inside;
    const distance = Math.ceil(wanted.length / count);
    if (wanted.length) return wanted.filter((_, place) => place % Math.max(1, distance) === 0);
  }
  const raw = (high - low || 1) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((value) => value >= raw);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) {
    found.push(Number(value.toPrecision(12)));
  }
  return found;
}
function compact(value) {
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit) return `${Number((value / unit).toPrecision(3))}${letter}`;
  }
  return size > 0 && size < 1e-3 ? value.toExponential(1).replace(".0e", "e") : String(Number(value.toPrecision(4)));
}
