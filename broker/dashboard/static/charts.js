// Lines over time with marks, by uPlot.
import { html, useEffect, useRef } from "./vendor/preact-htm.js";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const MARKS = { "fail-over": "--mark-leader", gone: "--bad", joined: "--good", isr: "--warn", disk: "--bad", at: "--muted" };

// Seconds between two times on an axis.
const STEPS = [1, 5, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 14_400, 21_600];

// Draws a line and a dot for each mark, and puts their texts where the pointer can find them.
const marksPlugin = (marks) => ({
  hooks: {
    draw: (plot) => {
      const { ctx, bbox } = plot;
      ctx.save();
      marks.current.forEach((mark) => {
        const x = Math.round(plot.valToPos(mark[0] / 1000, "x", true));
        if (x < bbox.left || x > bbox.left + bbox.width) return;
        ctx.strokeStyle = ctx.fillStyle = colour(MARKS[mark[1]] || "--muted");
        ctx.lineWidth = devicePixelRatio;
        ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
        ctx.beginPath();
        ctx.arc(x, bbox.top + 4 * devicePixelRatio, 3.5 * devicePixelRatio, 0, 7);
        ctx.fill();
      });
      ctx.restore();
    },
  },
});

// `series`: [{ label, colour, fill }]; `data`: columns, the times first; `marks`: [[at_ms, kind, text, broker]].
export function Chart({ label, series, data, marks = [], format, height = 190, span }) {
  const box = useRef(null);
  const plot = useRef(null);
  const shown = useRef(marks);
  shown.current = marks;
  const range = () => {
    const last = data[0].length ? data[0][data[0].length - 1] : Date.now() / 1000;
    return span ? [last - span, last] : [data[0][0] ?? last - 60, last];
  };
  const wanted = useRef(range);
  wanted.current = range;
  useEffect(() => {
    const make = () => {
      plot.current?.destroy();
      const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
      plot.current = new window.uPlot(
        {
          width: box.current.clientWidth,
          height,
          padding: [8, 20, 0, 0],
          legend: { show: false },
          cursor: { y: false, points: { size: 6 } },
          scales: { x: { time: true, range: () => wanted.current() }, y: { range: (self, low, high) => [0, Math.max(high * 1.15, 1)] } },
          axes: [
            { ...axis, space: 64, size: 22, incrs: STEPS, values: (self, ticks, axisAt, space, step) => ticks.map((each) => new Date(each * 1000).toTimeString().slice(0, step < 60 ? 8 : 5)) },
            { ...axis, size: (self, shown) => 14 + 7 * Math.max(1, ...(shown || []).map((each) => each.length)), values: (self, ticks) => ticks.map(format) },
          ],
          series: [{}, ...series.map((each) => ({ label: each.label, stroke: colour(each.colour), fill: each.fill ? `${colour(each.colour)}1f` : undefined, width: 1.75, points: { show: false } }))],
          plugins: [marksPlugin(shown)],
        },
        data,
        box.current,
      );
    };
    make();
    const resized = new ResizeObserver(() => plot.current.setSize({ width: box.current.clientWidth, height }));
    resized.observe(box.current);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", make);
    return () => {
      resized.disconnect();
      scheme.removeEventListener("change", make);
      plot.current.destroy();
    };
  }, [series.length, height, span]);
  useEffect(() => {
    plot.current.setData(data);
  }, [data, marks]);
  const latest = data.slice(1).map((column) => column[column.length - 1]);
  const told = series.map((each, at) => `${each.label} ${latest[at] === undefined ? "none" : format(latest[at])}`).join(", ");
  return html`<figure class="chart">
    <figcaption>${series.map((each, at) => html`<span><i class=${`swatch ${each.colour.slice(2)}`}></i>${each.label} <b>${latest[at] === undefined || latest[at] === null ? "–" : format(latest[at])}</b></span>`)}</figcaption>
    <div ref=${box} role="img" aria-label=${`${label}: ${told}`}></div>
  </figure>`;
}

// A small line without axes.
export function Spark({ values, label }) {
  if (!values.length) return null;
  const high = Math.max(...values, 1);
  const points = values.map((value, at) => `${((at / Math.max(values.length - 1, 1)) * 100).toFixed(1)},${(27 - (value / high) * 24).toFixed(1)}`).join(" ");
  return html`<svg class="spark" viewBox="0 0 100 28" preserveAspectRatio="none" role="img" aria-label=${label}><polyline points=${points} /></svg>`;
}
