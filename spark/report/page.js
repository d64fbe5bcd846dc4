"use strict";
// A cursor for each plot: under the pointer, or moved by the arrow keys. Everything it tells stands in the tables, too.
const units = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]];
const times = [[864e5, "d"], [36e5, "h"], [6e4, "min"], [1e3, "s"]];
const digits = (value) => value.toLocaleString("en", value >= 100 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 3 });
const scaled = (value, steps, small) => {
  const [step, name] = steps.find(([least]) => value >= least) || [1, small];
  return `${digits(value / step)} ${name}`;
};
const told = (value, unit) => {
  if (value === null) return "–";
  if (unit === "B/s") return `${scaled(value, units, "B")}/s`;
  if (unit === "ms") return scaled(value, times, "ms");
  if (unit === "/s") return `${digits(value)}/s`;
  return unit === "messages" ? digits(value) : `${digits(value)} ${unit}`;
};
const made = (name, className, text = "") => {
  const element = document.createElement(name);
  element.className = className;
  element.textContent = text;
  return element;
};
const line = (name, value, series) => {
  const paragraph = made("p", "");
  const label = made("span", "");
  if (series) {
    const dot = made("i", `${series.class} dot`);
    dot.style.cssText = series.style;
    label.append(dot);
  }
  label.append(name);
  paragraph.append(label, made("b", "", value));
  return paragraph;
};

for (const chart of document.querySelectorAll(".chart")) {
  const canvas = chart.querySelector(".canvas");
  const data = JSON.parse(chart.querySelector("script").textContent);
  const columns = data.at.length;
  const rows = data.rows ? data.rows.length : 1;
  const cursor = made("div", "cursor");
  const tip = made("div", "tip");
  // What is said to who listens instead of looking: it has to be there before it speaks.
  const voice = made("p", "voice");
  voice.setAttribute("role", "status");
  chart.append(voice);
  let column = -1, row = 0;

  const show = (newColumn, newRow) => {
    newColumn = Math.max(0, Math.min(columns - 1, newColumn));
    newRow = Math.max(0, Math.min(rows - 1, newRow));
    if (newColumn === column && newRow === row && cursor.isConnected) return;
    [column, row] = [newColumn, newRow];
    cursor.style.left = `${100 * column / columns}%`;
    cursor.style.width = `${100 / columns}%`;
    if (data.rows) {
      cursor.style.top = `${100 * row / rows}%`;
      cursor.style.bottom = `${100 - 100 * (row + 1) / rows}%`;
      cursor.style.outline = "2px solid var(--ink)";
    }
    canvas.append(cursor, tip);
    tip.replaceChildren(...lines());
    const half = column < columns / 2;
    const from = `calc(${100 * (half ? column + 1 : columns - column) / columns}% + .5rem)`;
    tip.style.left = half ? from : "auto";
    tip.style.right = half ? "auto" : from;
    if (data.rows) tip.style.top = row < rows / 2 ? `${100 * (row + 1) / rows}%` : "auto";
    if (data.rows) tip.style.bottom = row < rows / 2 ? "auto" : `${100 - 100 * row / rows}%`;
    // Beside the column when there is room, else wherever it is seen whole.
    const over = tip.getBoundingClientRect(), all = chart.getBoundingClientRect();
    if (over.right > all.right || over.left < all.left) {
      tip.style.left = over.right > all.right ? "auto" : "0";
      tip.style.right = over.right > all.right ? "0" : "auto";
    }
  };
  const lines = () => {
    if (data.rows) return [made("p", "", data.at[column]), line(data.rows[row], told(data.values[row][column], data.unit))];
    const found = data.series.filter((series) => series.values[column] || !data.total);
    const sum = found.reduce((total, series) => total + (series.values[column] || 0), 0);
    const many = [...found].reverse().map((series) => line(series.name, told(series.values[column], data.unit), series.name && series));
    return [made("p", "", data.at[column]), ...(data.total ? [line("all", told(sum, data.unit))] : []), ...many];
  };
  const hide = () => { cursor.remove(); tip.remove(); };
  const point = (event) => {
    const box = canvas.getBoundingClientRect();
    show(Math.floor((event.clientX - box.left) / box.width * columns), Math.floor((event.clientY - box.top) / box.height * rows));
  };
  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerdown", point);
  canvas.addEventListener("pointerleave", hide);
  canvas.addEventListener("blur", hide);
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (event.key === "Escape") return hide();
    if (event.key === "Home" || event.key === "End") show(event.key === "Home" ? 0 : columns - 1, row);
    else if (move && (move[0] || rows > 1)) show(column + move[0], row + move[1]);
    else return;
    voice.textContent = [...tip.children].map((told) => [...told.childNodes].map((node) => node.textContent).join(" ")).join(", ");
    event.preventDefault();
  });
}
