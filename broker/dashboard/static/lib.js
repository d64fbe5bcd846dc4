// What all views share: the API, the address, numbers and times as text, and small components.
import { decode, tokens } from "./exact.js";
import { html, useCallback, useEffect, useRef, useState } from "./vendor/preact-htm.js";

const root = document.getElementById("app");
export const here = { ...root.dataset, mayWrite: root.dataset.writes === "yes", hasToken: root.dataset.token === "yes" };

// --- the API ----------------------------------------------------------------------------------------------------------

export class Problem extends Error {
  constructor(status, problem) {
    super(problem.detail || problem.title || `the broker answered ${status}`);
    this.status = status;
    this.code = problem.code;
  }
}

// Calls the API; returns the decoded answer, or null for one without a body. With `bytes`, the bytes of the answer.
export async function call(method, path, body, { headers = {}, signal, bytes } = {}) {
  const options = { method, signal, headers: { Accept: "application/json", ...headers } };
  if (body !== undefined) {
    options.body = typeof body === "string" ? body : JSON.stringify(body);
    options.headers["Content-Type"] = headers["Content-Type"] || "application/json";
  }
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (fault) {
    if (fault.name === "AbortError") throw fault;
    throw new Problem(0, { detail: "the broker does not answer" });
  }
  if (answer.status === 401 && here.hasToken) {
    location.assign(`/ui/login?next=${encodeURIComponent(location.pathname + location.search)}`);
  }
  if (bytes && answer.ok) return new Uint8Array(await answer.arrayBuffer());
  const text = await answer.text();
  let value = null;
  try {
    value = text ? decode(text) : null;
  } catch {
    value = { detail: text.slice(0, 300) };
  }
  if (!answer.ok) throw new Problem(answer.status, value || {});
  return value;
}

// The newest answer of a GET, asked again every `every` ms while the page is visible. An older answer stays meanwhile.
export function useGet(path, every = 0) {
  const [state, setState] = useState({ data: null, fault: null, at: null, path: null });
  const again = useRef(() => {});
  useEffect(() => {
    if (!path) return undefined;
    let timer = 0;
    let ended = false;
    const stop = new AbortController();
    const ask = async () => {
      clearTimeout(timer);
      try {
        const data = await call("GET", path, undefined, { signal: stop.signal });
        if (!ended) setState({ data, fault: null, at: new Date(), path });
      } catch (fault) {
        if (!ended && fault.name !== "AbortError") setState((old) => ({ ...(old.path === path ? old : { data: null, at: null }), path, fault }));
      }
      if (!ended && every) timer = setTimeout(next, every);
    };
    const next = () => (document.hidden ? (timer = setTimeout(next, every)) : ask());
    again.current = ask;
    ask();
    return () => {
      ended = true;
      stop.abort();
      clearTimeout(timer);
    };
  }, [path, every]);
  const fresh = state.path === path ? state : { data: null, fault: null, at: null };
  return { ...fresh, reload: () => again.current() };
}

// --- the address ------------------------------------------------------------------------------------------------------

const listeners = new Set();
const place = () => ({ href: location.href, path: location.pathname, query: Object.fromEntries(new URLSearchParams(location.search)) });

export function go(address, { replace = false } = {}) {
  history[replace ? "replaceState" : "pushState"](null, "", address);
  listeners.forEach((each) => each());
  if (!replace) {
    window.scrollTo(0, 0);
    requestAnimationFrame(() => document.querySelector("main h1")?.focus({ preventScroll: true }));
  }
}

export function usePlace() {
  const [now, setNow] = useState(place);
  useEffect(() => {
    const changed = () => setNow((old) => (old.href === location.href ? old : place()));
    listeners.add(changed);
    window.addEventListener("popstate", changed);
    changed(); // an effect comes later than what it shows: a button of that may have been pressed by now
    return () => {
      listeners.delete(changed);
      window.removeEventListener("popstate", changed);
    };
  }, []);
  return now;
}

export function withQuery(path, query) {
  const kept = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return kept.length ? `${path}?${new URLSearchParams(kept)}` : path;
}

// Changes parameters of the present address; the state of a view is in its address.
export function setQuery(changes, options = { replace: true }) {
  const { path, query } = place();
  go(withQuery(path, { ...query, ...changes }), options);
}

// --- text -------------------------------------------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const some = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const brief = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
export const number = (value) => (value === null || value === undefined ? "–" : whole.format(value));
export const short = (value) => (value === null || value === undefined ? "–" : value < 10_000 ? some.format(value) : brief.format(value));
export const rate = (value) => (value === null || value === undefined ? "–" : value < 10 ? some.format(value) : short(Math.round(value)));

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${value < 10 && at ? value.toFixed(1) : Math.round(value)} ${units[at]}`;
}

export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1_000) return `${Math.round(ms)} ms`;
  const s = ms / 1_000;
  if (s < 60) return `${s < 10 ? s.toFixed(1) : Math.round(s)} s`;
  const m = Math.floor(s / 60);
  if (m < 60) return `${m} min${s % 60 >= 1 && m < 10 ? ` ${Math.floor(s % 60)} s` : ""}`;
  const h = Math.floor(m / 60);
  return h < 48 ? `${h} h${m % 60 && h < 10 ? ` ${m % 60} min` : ""}` : `${Math.floor(h / 24)} d`;
}

const two = (value) => String(value).padStart(2, "0");
export const clock = (date) => `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
export function moment(ms) {
  const date = new Date(ms);
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  const today = new Date().toDateString() === date.toDateString();
  return `${today ? "" : `${day} `}${clock(date)}.${String(date.getMilliseconds()).padStart(3, "0")}`;
}

// A part of a path as text; as it is, if it is not valid.
export function unescaped(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
export const url = (...parts) => parts.map(encodeURIComponent).join("/");
export const valueText = (message) => message.value_json ?? message.value ?? message.value_base64;
const quoted = (text) => `'${String(text).replaceAll("'", `'\\''`)}'`;
export const shell = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : quoted(text));

// --- components -------------------------------------------------------------------------------------------------------

export const Link = ({ to, children, ...more }) => html`<a href=${to} ...${more}>${children}</a>`;

export function Page({ title, crumbs = [], at, actions, children }) {
  useEffect(() => {
    document.title = `${typeof title === "string" ? title : "PortalMQ"} · PortalMQ`;
  }, [title]);
  return html`<header class="top">
      <div>
        ${crumbs.length > 0 && html`<nav class="crumbs" aria-label="Place">${crumbs.map(([name, to]) => html`<${Link} to=${to}>${name}<//><span aria-hidden="true">/</span>`)}</nav>`}
        <h1 tabindex="-1">${title}</h1>
      </div>
      <div class="aside">${at && html`<span class="asof">as of <time>${clock(at)}</time></span>`}${actions}</div>
    </header>
    ${children}`;
}

export const Card = ({ title, note, children, flush, ...more }) => html`<section class=${`card${flush ? " flush" : ""}`} ...${more}>
  ${title && html`<header><h2>${title}</h2>${note && html`<span class="note">${note}</span>`}</header>`}${children}
</section>`;

export const Stat = ({ label, value, unit, note, tone }) => html`<div class=${`stat ${tone || ""}`}>
  <dt>${label}</dt><dd>${value}${unit && html`<small> ${unit}</small>`}</dd>${note && html`<dd class="note">${note}</dd>`}
</div>`;

export const Tag = ({ tone = "", children }) => html`<span class=${`tag ${tone}`}>${children}</span>`;
export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;
export const Fault = ({ fault }) => fault && html`<p class="alert" role="alert">${fault.message}</p>`;
export const Loading = ({ of }) => (of.fault && !of.data ? html`<${Fault} fault=${of.fault} />` : html`<p class="empty" role="status">…</p>`);

// A table. A column: { name, of: row => content, number, wide, minor }; a phone leaves out what is minor.
export function Table({ columns, rows, keyOf, label, empty = "Nothing here." }) {
  if (!rows.length) return html`<${Empty}>${empty}<//>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${label}><table>
    <thead><tr>${columns.map((each) => html`<th scope="col" class=${`${each.number ? "number" : ""}${each.minor ? " minor" : ""}`}>${each.name}</th>`)}</tr></thead>
    <tbody>${rows.map((row, at) => html`<tr key=${keyOf ? keyOf(row) : at}>${columns.map((each, column) => html`<${column ? "td" : "th"} scope=${column ? undefined : "row"} class=${`${each.number ? "number" : each.wide ? "wide" : ""}${each.minor ? " minor" : ""}`}>${each.of(row)}<//>`)}</tr>`)}</tbody>
  </table></div>`;
}

export function Pager({ found }) {
  if (!found || found.pages < 2) return null;
  const { page, pages, total } = found;
  return html`<nav class="pager" aria-label="Pages">
    <button disabled=${page <= 1} onClick=${() => setQuery({ page: page - 1 })}>Previous</button>
    <span>page ${number(page)} of ${number(pages)} · ${number(total)} in all</span>
    <button disabled=${page >= pages} onClick=${() => setQuery({ page: page + 1 })}>Next</button>
  </nav>`;
}

// A search field whose text is in the address.
export function Search({ label, name = "search" }) {
  const { query } = usePlace();
  const [text, setText] = useState(query[name] || "");
  const timer = useRef(0);
  const typed = (event) => {
    setText(event.target.value);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => setQuery({ [name]: event.target.value, page: "" }), 200);
  };
  return html`<input type="search" aria-label=${label} placeholder=${label} value=${text} onInput=${typed} data-search />`;
}

// The pages of a list that goes on after a place; the place is in the address.
export function After({ next, name = "after" }) {
  const { query } = usePlace();
  if (!query[name] && !next) return null;
  return html`<nav class="pager" aria-label="Pages"><button disabled=${!query[name]} onClick=${() => setQuery({ [name]: "" }, {})}>First page</button><button disabled=${!next} onClick=${() => setQuery({ [name]: next }, {})}>Next</button></nav>`;
}

// A field for a moment that is in the address. `clears`: what has no meaning with it.
export const localTime = (ms) => new Date(ms - new Date(ms).getTimezoneOffset() * 60_000).toISOString().slice(0, 19);
export function Moment({ label, name = "at", clears = {} }) {
  const { query } = usePlace();
  const ms = Date.parse(query[name]);
  const chosen = (event) => {
    const date = new Date(event.target.value);
    setQuery({ ...clears, [name]: Number.isNaN(date.getTime()) ? "" : date.toISOString() });
  };
  return html`<label class="inline">${label}<input type="datetime-local" step="1" value=${Number.isNaN(ms) ? "" : localTime(ms)} onChange=${chosen} /></label>`;
}

// A list to choose from. An option: a text, or [value, text].
export const Choice = ({ label, value, options, onChange, ...more }) => html`<label class="inline">${label}<select onChange=${(event) => onChange(event.target.value)} ...${more}>${options.map((each) => {
  const [of, says] = Array.isArray(each) ? each : [each, each];
  return html`<option key=${of} value=${of} selected=${String(of) === String(value)}>${says}</option>`;
})}</select></label>`;

export function Copy({ text }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      return; // without TLS, browsers offer the clipboard on localhost alone
    }
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return html`<button class="quiet" onClick=${copy} aria-label="Copy">${done ? "copied" : "copy"}</button>`;
}

// The same as a curl and a portalmq command. `before`: what the command reads from.
function commands({ curl, command, before = "" }) {
  const token = here.hasToken ? ` -H "Authorization: Bearer $TOKEN"` : "";
  return [curl && `curl${token} ${curl}`, command && `${before}portalmq ${command} --server ${location.origin}${here.hasToken ? " --token-file FILE" : ""}`].filter(Boolean);
}
export const Same = (of) => html`<section class="same" aria-label="The same as a command"><h2>The same as a command</h2>${commands(of).map((each) => html`<div><code>${each}</code><${Copy} text=${each} /></div>`)}</section>`;
// The same, of an act in a view.
export const Does = (of) => commands(of).map((each) => html`<p class="hint mono">${each}</p>`);
export const at = (path) => shell(location.origin + path);
export const post = (path, body, method = "POST") => `-X ${method} ${at(path)}${body === undefined ? "" : ` -H 'Content-Type: application/json' -d ${quoted(JSON.stringify(body))}`}`;

// JSON with its parts told apart; text, never markup. Only the space between its parts is not as it was.
const COLOURED_MAX = 100_000;
const INDENTED_MAX = 40;
export function Json({ text }) {
  if (text.length > COLOURED_MAX) return html`<pre class="json">${text}</pre>`;
  const parts = [];
  let [depth, before] = [0, ""];
  const line = () => `\n${"  ".repeat(Math.min(depth, INDENTED_MAX))}`;
  const all = [...tokens(text)];
  all.forEach(([at, end], index) => {
    const first = text[at];
    const isEnd = first === "}" || first === "]";
    const isBegun = before === "{" || before === "[";
    if (isEnd) depth -= 1;
    if (isBegun !== isEnd || before === ",") parts.push(line());
    if (first === "{" || first === "[") depth += 1;
    const shown = text.slice(at, end);
    const kind = first === '"' ? (text[all[index + 1]?.[0]] === ":" ? "key" : "text") : /[-\d]/.test(first) ? "figure" : /\w/.test(first) ? "word" : "";
    parts.push(kind ? html`<span class=${kind}>${shown}</span>` : first === ":" ? ": " : shown);
    before = first;
  });
  return html`<pre class="json">${parts}</pre>`;
}

export function Value({ message }) {
  if (message.value_json !== undefined) return html`<${Json} text=${message.value_json} />`;
  return html`<pre class="json">${message.value ?? message.value_base64}</pre>`;
}

// --- acts -------------------------------------------------------------------------------------------------------------

const notes = { list: [], tell: () => {} };
export function say(text, tone = "good") {
  const note = { text, tone, id: Math.random() };
  notes.list = [...notes.list, note].slice(-4);
  notes.tell();
  setTimeout(() => {
    notes.list = notes.list.filter((each) => each !== note);
    notes.tell();
  }, 6_000);
}

export function Notes() {
  const [, tell] = useState(0);
  notes.tell = () => tell(Math.random());
  return html`<div class="notes" role="status" aria-live="polite">${notes.list.map((note) => html`<p key=${note.id} class=${note.tone}>${note.text}</p>`)}</div>`;
}

// Runs an act once at a time, and tells its result or its fault.
export function useAct() {
  const [busy, setBusy] = useState(false);
  const run = useCallback(async (act, done) => {
    setBusy(true);
    try {
      const result = await act();
      if (done) say(typeof done === "function" ? done(result) : done);
      return result;
    } catch (fault) {
      say(fault.message, "bad");
      return undefined;
    } finally {
      setBusy(false);
    }
  }, []);
  return [run, busy];
}

// A button; for a session that may only read it says why it does nothing.
export const Act = ({ children, disabled, title, ...more }) => html`<button type="button" disabled=${disabled || !here.mayWrite} title=${here.mayWrite ? title : "This session may only read"} ...${more}>${children}</button>`;

export function Dialog({ title, open, onClose, children }) {
  const box = useRef(null);
  useEffect(() => {
    if (open && !box.current.open) box.current.showModal();
    if (!open && box.current?.open) box.current.close();
  }, [open]);
  return html`<dialog ref=${box} onClose=${onClose} aria-label=${title}>${open && html`<h2>${title}</h2>${children}`}</dialog>`;
}

// A button for what destroys: it asks for the name of what is destroyed.
export function Destroy({ label, name, says, act, done }) {
  const [open, setOpen] = useState(false);
  const [typed, setTyped] = useState("");
  const [run, busy] = useAct();
  const close = () => {
    setOpen(false);
    setTyped("");
  };
  const submit = async (event) => {
    event.preventDefault();
    if (typed !== name) return;
    await run(act, done);
    close();
  };
  return html`<${Act} class="danger" aria-haspopup="dialog" onClick=${() => setOpen(true)}>${label}<//>
    <${Dialog} title=${label} open=${open} onClose=${close}>
      <form onSubmit=${submit}>
        <p>${says}</p>
        <label>Type <strong>${name}</strong> to go on<input value=${typed} onInput=${(event) => setTyped(event.target.value)} autocomplete="off" spellcheck="false" autofocus data-confirm /></label>
        <div class="row end"><button type="button" onClick=${close}>Cancel</button><button class="danger" disabled=${busy || typed !== name}>${label}</button></div>
      </form>
    <//>`;
}

// Rows as CSV (RFC 4180). Text that a spreadsheet would run as a formula begins with a quote instead; a number stays one.
const FORMULA = /^[=+\-@\t\r\n\0＝＋－＠]/;
const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;
export function csv(rows) {
  const cell = (value) => {
    const text = value === null ? "" : typeof value === "object" ? value.base64 : String(value);
    const safe = FORMULA.test(text) && !NUMBER.test(text) ? `'${text}` : text;
    return /[",;\t\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  return rows.map((row) => row.map(cell).join(",")).join("\r\n");
}

export function download(name, text, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1_000);
}

export const messageUrl = (message) => `/ui/topics/${url(message.topic)}/messages/${message.id}`;
export { html };
