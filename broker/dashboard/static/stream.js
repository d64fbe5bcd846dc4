// The stream of events of the broker: the past first, then each second. Closed while nobody looks.
import { useEffect, useState } from "./vendor/preact-htm.js";

const KEPT = 900;
// There is an event each second. After so long without one the broker is lost, whatever the connection says.
const SILENT_MS = 6_000;
let source = null;
let now = { rows: [], marks: [], brokers: [], topics: [], groups: [], state: "connecting" };
const listeners = new Set();

let watch = 0;

function heard() {
  clearTimeout(watch);
  watch = setTimeout(() => {
    if (!source) return;
    take({ state: "lost" });
    close();
    open();
  }, SILENT_MS);
}

function take(changes) {
  now = { ...now, ...changes };
  listeners.forEach((each) => each(now));
}

function open() {
  if (source || document.hidden || !listeners.size) return;
  source = new EventSource("/ui/events");
  heard();
  source.addEventListener("history", (event) => {
    heard();
    take({ ...JSON.parse(event.data), state: "live" });
  });
  source.addEventListener("tick", (event) => {
    heard();
    const found = JSON.parse(event.data);
    // A second that was unknown may be known by now.
    const bySecond = new Map([...now.rows, ...found.rows].map((row) => [row[0], row]));
    const rows = [...bySecond.values()].sort((one, other) => one[0] - other[0]).slice(-KEPT);
    take({ ...found, rows, state: "live" });
  });
  source.onerror = () => {
    take({ state: "lost" });
    if (source && source.readyState === EventSource.CLOSED) {
      close();
      setTimeout(open, 2_000);
    }
  };
}

function close() {
  clearTimeout(watch);
  source?.close();
  source = null;
}

document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));

export function useStream() {
  const [value, setValue] = useState(now);
  useEffect(() => {
    listeners.add(setValue);
    open();
    return () => {
      listeners.delete(setValue);
    };
  }, []);
  return value;
}
