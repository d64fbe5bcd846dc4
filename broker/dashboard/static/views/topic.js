// One topic: its messages, partitions, settings, and a form to publish.
import { base64, inexact, isJson, messageJson } from "../exact.js";
import { useEffect, useMemo, useRef, useState } from "../vendor/preact-htm.js";
import { Act, Card, Choice, Destroy, Fault, Link, Loading, Moment, Page, Same, Stat, Table, Tag, Value, at, bytes, call, clock, download, go, html, messageUrl, moment, number, post, setQuery, shell, url, useAct, useGet, usePlace, valueText, withQuery } from "../lib.js";

const TABS = [["", "Messages"], ["partitions", "Partitions"], ["publish", "Publish"], ["settings", "Settings"]];

export function Topic({ names: [topic] }) {
  const { query } = usePlace();
  const tab = query.tab || "";
  const found = useGet(`/v1/topics/${url(topic)}`, 3_000);
  const { data } = found;
  const sum = (name) => data.partitions.reduce((total, each) => total + each[name], 0);
  const lacking = data ? data.partitions.filter((each) => each.isr.length < each.replicas.length).length : 0;
  const offline = data ? data.partitions.filter((each) => each.leader === null).length : 0;
  return html`<${Page} title=${topic} crumbs=${[["Topics", "/ui/topics"]]} at=${found.at}>
    ${!data ? html`<${Loading} of=${found} />` : html`
      <${Fault} fault=${found.fault} />
      <dl class="stats">
        <${Stat} label="Partitions" value=${number(data.partitions.length)} note=${offline ? `${offline} without a leader` : lacking ? `${lacking} lack a replica` : "led, in sync"} tone=${offline ? "bad" : lacking ? "warn" : ""} />
        <${Stat} label="Replicas" value=${number(data.replication_factor)} note=${`${data.config.min_insync_replicas ?? "a majority"} must have a message`} />
        <${Stat} label="Offsets" value=${number(sum("high_watermark") - sum("log_start_offset"))} note="readable, with control records" />
        <${Stat} label="Size" value=${bytes(sum("size_bytes"))} note="of the leaders’ files" />
      </dl>
      <nav class="tabs" aria-label="Views of the topic">${TABS.map(([name, says]) => html`<${Link} to=${withQuery(`/ui/topics/${url(topic)}`, { tab: name })} aria-current=${tab === name ? "page" : undefined}>${says}<//>`)}</nav>
      ${tab === "" && html`<${Browse} topic=${topic} partitions=${data.partitions.length} />`}
      ${tab === "partitions" && html`<${Partitions} topic=${topic} rows=${data.partitions} />`}
      ${tab === "publish" && html`<${Publish} topic=${topic} partitions=${data.partitions.length} />`}
      ${tab === "settings" && html`<${Settings} topic=${topic} data=${data} reload=${found.reload} />`}`}
  <//>`;
}

// --- messages -----------------------------------------------------------------------------------------------------------

// What is typed as a filter: JSON of the where language, or words that mean one: key=…, header.x=…, value.a.b>3, text.
export function whereOf(text) {
  const typed = text.trim();
  if (!typed) return null;
  const refuse = (figure) => {
    throw new Error(`${figure} has more digits than a page can hold: ask with curl, or quote it if it is text`);
  };
  if (typed.startsWith("{")) return inexact(typed) ? refuse(inexact(typed)) : JSON.parse(typed);
  const where = {};
  const operators = { "=": "eq", "!=": "ne", "<": "lt", "<=": "lte", ">": "gt", ">=": "gte", "~": "contains" };
  const pattern = /((?:headers?|value)(?:\.[\w.-]+)|key|reason|delivery_count|value)\s*(!=|<=|>=|=|<|>|~)\s*("[^"]*"|\S+)/g;
  const rest = typed.replace(pattern, (_, name, operator, operand) => {
    const field = name.replace(/^header\./, "headers.");
    const bare = operand.startsWith('"') ? operand.slice(1, -1) : operand;
    const isText = operand.startsWith('"') || field === "key" || field.startsWith("headers.") || field === "reason";
    const value = isText || !/^(-?\d+(\.\d+)?|true|false|null)$/.test(bare) ? bare : JSON.parse(bare);
    if (typeof value === "number" && inexact(bare)) refuse(bare);
    where[field] = { ...where[field], [operators[operator]]: value };
    return "";
  });
  if (rest.trim()) throw new Error(`“${rest.trim()}” is no condition: write key=…, headers.name=…, value.field>3, or JSON such as {"value.total": {"gt": 100}}`);
  return where;
}

function Browse({ topic, partitions }) {
  const { query } = usePlace();
  const [text, setText] = useState(query.where || "");
  const [wrong, setWrong] = useState(null);
  const [more, setMore] = useState({ of: "", messages: [], next: undefined });
  const tail = !!query.tail;
  const [where, refused] = useMemo(() => {
    try {
      return [query.where ? JSON.stringify(whereOf(query.where)) : undefined, null];
    } catch (fault) {
      return [undefined, fault.message];
    }
  }, [query.where]);
  const order = query.at || query.offset ? "oldest" : undefined;
  const after = query.offset && query.partition ? `${query.partition}-${query.offset}` : undefined;
  const wanted = { topic, partition: query.partition, where, at: after ? undefined : query.at, order, after };
  const path = withQuery("/ui/data/messages", wanted);
  const found = useGet(refused ? null : path);
  const own = more.of === path ? more : { of: path, messages: [], next: undefined };
  const messages = [...(found.data?.messages || []), ...own.messages];
  const next = own.next === undefined ? found.data?.next : own.next;
  const [run, busy] = useAct();
  const submit = (event) => {
    event.preventDefault();
    try {
      whereOf(text);
    } catch (fault) {
      setWrong(fault.message);
      return;
    }
    setWrong(null);
    setQuery({ where: text });
  };
  const goOn = () => run(async () => {
    const page = await call("GET", withQuery("/ui/data/messages", { ...wanted, at: undefined, after: next }));
    setMore({ of: path, messages: [...own.messages, ...page.messages], next: page.next });
  });
  const told = found.at && `${number(messages.length)} shown, ${order ? "the oldest" : "the newest"} first, as of ${clock(found.at)}`;
  const only = `${query.partition ? ` --partition ${shell(query.partition)}` : ""}${where ? ` --where ${shell(where)}` : ""}`;
  const command = tail ? `consume ${shell(topic)}` : `peek ${shell(topic)}${order ? `${after ? ` --offset ${shell(query.offset)}` : ` --since ${shell(query.at)}`}` : " --newest"}${only} -n 50`;
  const partitionPath = `/v1/topics/${url(topic)}/partitions/${url(query.partition || "0")}/messages`;
  return html`<form class="tools" onSubmit=${submit} role="search">
      <input type="search" aria-label="Filter" placeholder='Filter: key=a  headers.trace=1  value.total>100  {"value.a": {"exists": true}}' value=${text} onInput=${(event) => setText(event.target.value)} data-search spellcheck="false" class="grow mono" />
      <button>Filter</button>
      <button type="button" aria-pressed=${tail} class=${tail ? "pressed" : ""} onClick=${() => setQuery({ tail: tail ? "" : 1 })}>${tail ? "Stop tail" : "Live tail"}</button>
    </form>
    <div class="tools">
      <${Choice} label="Partition" value=${query.partition || ""} options=${[["", "all"], ...[...Array(partitions).keys()].map((each) => [each, each])]} onChange=${(partition) => setQuery({ partition, offset: "" })} />
      <label class="inline">From offset<input type="number" min="0" disabled=${!query.partition} value=${query.offset || ""} placeholder=${query.partition ? "newest" : ""} title=${query.partition ? "" : "Choose a partition first"} onChange=${(event) => setQuery({ offset: event.target.value, at: "" })} /></label>
      <${Moment} label="From time" clears=${{ offset: "" }} />
      ${messages.length > 0 && html`<button type="button" class="quiet" onClick=${() => download(`${topic}.json`, `[\n${messages.map(messageJson).join(",\n")}\n]`, "application/json")}>Download JSON</button>`}
    </div>
    ${(wrong || refused) && html`<p class="alert" role="alert">${wrong || refused}</p>`}
    <${Fault} fault=${found.fault} />
    ${refused ? null : tail ? html`<${Tail} topic=${topic} partition=${query.partition} where=${where} />` : found.data ? html`<${Card} flush><${Messages} rows=${messages} empty=${where ? `None of the ${number(found.data.scanned)} messages that were read match.` : "There is no message."} /><//>
      <p class="pager">${next && html`<button disabled=${busy} onClick=${goOn}>${messages.length ? "More" : "Search on"}</button>`}<button onClick=${found.reload}>Refresh</button><span>${told}</span></p>` : !found.fault && html`<${Loading} of=${found} />`}
    <${Same} curl=${tail ? `-N -H 'Accept: text/event-stream' ${at(`${partitionPath}?offset=latest`)}` : at(path)} command=${command} />`;
}

export function Messages({ rows, empty, extra = [] }) {
  return html`<${Table} label="Messages" rows=${rows} keyOf=${(row) => `${row.topic} ${row.id}`} empty=${empty} columns=${[
    { name: "Message", of: (row) => html`<${Link} to=${messageUrl(row)} class="mono">${row.id}<//>` },
    { name: "Appended", minor: extra.length > 0, of: (row) => html`<time class="mono">${moment(row.timestamp_ms)}</time>` },
    ...extra,
    { name: "Key", of: (row) => html`<span class="mono cut">${row.key ?? row.key_base64 ?? ""}</span>` },
    { name: "Value", wide: true, of: (row) => html`<span class="mono cut">${String(valueText(row)).slice(0, 300)}</span>` },
    { name: "Headers", minor: true, of: (row) => html`<span class="mono cut muted">${Object.entries(row.headers).map(([name, value]) => `${name}: ${value}`).join(", ").slice(0, 120)}</span>` },
  ]} />`;
}

function Tail({ topic, partition, where }) {
  const [state, setState] = useState({ messages: [], fault: null });
  const box = useRef(null);
  useEffect(() => {
    let ended = false;
    let timer = 0;
    let place = null;
    const look = async () => {
      try {
        const order = place === null ? {} : { order: "oldest", after: place };
        const found = await call("GET", withQuery("/ui/data/messages", { topic, partition, where, limit: place === null ? 10 : 500, ...order }));
        if (ended) return;
        const newest = place === null ? found.messages : [...found.messages].reverse();
        place = found.tail;
        if (newest.length) setState((old) => ({ messages: [...newest, ...old.messages].slice(0, 300), fault: null }));
      } catch (fault) {
        if (!ended) setState((old) => ({ ...old, fault }));
      }
      if (!ended) timer = setTimeout(look, document.hidden ? 5_000 : 1_000);
    };
    look();
    return () => {
      ended = true;
      clearTimeout(timer);
    };
  }, [topic, partition, where]);
  return html`<${Fault} fault=${state.fault} /><div ref=${box} data-tail><${Card} title="Live" note="the newest first, the last 300" flush><${Messages} rows=${state.messages} empty="Waiting for messages." /><//></div>`;
}

// --- partitions ---------------------------------------------------------------------------------------------------------

function Partitions({ topic, rows }) {
  return html`<${Card} flush><${Table} label="Partitions" rows=${rows} keyOf=${(row) => row.partition} columns=${[
      { name: "Partition", of: (row) => html`<${Link} to=${withQuery(`/ui/topics/${url(topic)}`, { partition: row.partition })}>${row.partition}<//>` },
      { name: "Leader", of: (row) => (row.leader === null ? html`<${Tag} tone="bad">none<//>` : `broker ${row.leader}`) },
      { name: "Epoch", number: true, of: (row) => number(row.leader_epoch) },
      { name: "Replicas", of: (row) => html`<${Replicas} of=${row} />` },
      { name: "First offset", number: true, of: (row) => number(row.log_start_offset) },
      { name: "End", number: true, of: (row) => number(row.high_watermark) },
      { name: "Size", number: true, of: (row) => bytes(row.size_bytes) },
    ]} /><//>
    <${Same} curl=${at(`/v1/topics/${url(topic)}`)} command=${`topic show ${shell(topic)}`} />`;
}

export const Replicas = ({ of }) => html`<span class="replicas">${of.replicas.map((each) => html`<i class=${each === of.leader ? "leads" : of.isr.includes(each) ? "in-sync" : "lacks"} title=${`broker ${each}: ${each === of.leader ? "leads" : of.isr.includes(each) ? "in sync" : "not in sync"}`}>${each}</i>`)}</span>`;

// --- publish ------------------------------------------------------------------------------------------------------------

// Headers out of lines such as `trace: 42`.
export const headersOf = (text) => Object.fromEntries(text.split("\n").map((line) => line.split(/:(.*)/s)).filter(([name, value]) => name.trim() && value !== undefined).map(([name, value]) => [name.trim(), value.trim()]));

function Publish({ topic, partitions }) {
  const [form, setForm] = useState({ value: "", key: "", headers: "", partition: "", delay: "" });
  const [run, busy] = useAct();
  const set = (name) => (event) => setForm({ ...form, [name]: event.target.value });
  const isText = !isJson(form.value);
  const message = useMemo(() => {
    const built = {};
    if (isText) built.content_type = "text/plain; charset=utf-8";
    if (form.key) built.key = form.key;
    const headers = headersOf(form.headers);
    if (Object.keys(headers).length) built.headers = headers;
    if (form.partition !== "") built.partition = Number(form.partition);
    if (form.delay) built.delay_ms = Math.round(Number(form.delay) * 1000);
    if (isText) built.value_base64 = base64(new TextEncoder().encode(form.value));
    return messageJson(isText ? built : { ...built, value: 0, value_json: form.value.trim() });
  }, [form]);
  const body = `{"messages":[${message}]}`;
  const words = ["produce", shell(topic), ...(isText ? [] : ["--ndjson"]), ...(form.key ? ["-k", shell(form.key)] : []), ...Object.entries(headersOf(form.headers)).flatMap(([name, value]) => ["-H", shell(`${name}=${value}`)]), ...(form.partition === "" ? [] : ["--partition", shell(form.partition)]), ...(form.delay ? ["--delay", shell(`${form.delay}s`)] : [])];
  const submit = async (event) => {
    event.preventDefault();
    const sent = await run(async () => {
      const answer = await call("POST", `/v1/topics/${url(topic)}/messages`, body, { headers: { "Content-Type": "application/vnd.portalmq.batch+json" } });
      const [result] = answer.results;
      if (result.error) throw new Error(result.error.detail || result.error.title);
      return result;
    }, (result) => `appended as ${result.partition}-${result.offset}`);
    if (sent && !form.delay) setForm({ ...form, value: "" });
  };
  return html`<${Card}><form onSubmit=${submit} class="publish">
      <label>Value<textarea rows="8" class="mono" value=${form.value} onInput=${set("value")} placeholder='{"celsius": 21.5}' spellcheck="false"></textarea><span class="hint">${isText ? "text" : "JSON"}</span></label>
      <div class="row"><label>Key<input value=${form.key} onInput=${set("key")} class="mono" autocomplete="off" /></label>
        <label>Partition<input type="number" min="0" max=${partitions - 1} value=${form.partition} onInput=${set("partition")} placeholder="by the key" /></label>
        <label>Delay, s<input type="number" min="0" step="any" value=${form.delay} onInput=${set("delay")} placeholder="none" /></label></div>
      <label>Headers, one a line<textarea rows="2" class="mono" value=${form.headers} onInput=${set("headers")} placeholder="trace: 42" spellcheck="false"></textarea></label>
      <div class="row end"><${Act} type="submit" class="primary" disabled=${busy}>Publish<//></div>
    </form><//>
    <${Same} curl=${`-X POST ${at(`/v1/topics/${url(topic)}/messages`)} -H 'Content-Type: application/vnd.portalmq.batch+json' -d ${shell(body)}`} command=${words.join(" ")} before=${`echo ${shell(isText ? form.value : form.value.trim().replaceAll("\n", " "))} | `} />`;
}

// --- settings -----------------------------------------------------------------------------------------------------------

function Settings({ topic, data, reload }) {
  const [run, busy] = useAct();
  const save = async (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    const config = {};
    Object.entries(data.config).forEach(([name, value]) => {
      const typed = form.get(name);
      const given = typed === "" ? null : typeof value === "string" ? typed : Number(typed);
      if (given !== value) config[name] = given;
    });
    const partitions = Number(form.get("partitions"));
    const wanted = { ...(Object.keys(config).length ? { config } : {}), ...(partitions !== data.partitions.length ? { partitions } : {}) };
    if (!Object.keys(wanted).length) return;
    await run(() => call("PATCH", `/v1/topics/${url(topic)}`, wanted), "changed");
    reload();
  };
  return html`<${Card} title="Settings"><form onSubmit=${save} class="settings" key=${JSON.stringify(data.config)}>
      <label>partitions<input name="partitions" type="number" min=${data.partitions.length} max="1000" value=${data.partitions.length} /></label>
      ${Object.entries(data.config).map(([name, value]) => html`<label key=${name}>${name}${name === "cleanup" ? html`<select name=${name}>${["delete", "compact"].map((each) => html`<option selected=${each === value}>${each}</option>`)}</select>` : html`<input name=${name} type="number" value=${value ?? ""} placeholder="none" />`}</label>`)}
      <div class="row end"><${Act} type="submit" class="primary" disabled=${busy}>Change<//></div>
    </form><//>
    <${Card} title="What cannot be undone"><p>Purging removes all messages that are readable now. Deleting removes the topic and its files from all brokers.</p>
      <div class="row"><${Destroy} label="Purge messages" name=${topic} says=${`All messages of ${topic} are removed.`} act=${() => call("DELETE", `/v1/topics/${url(topic)}/messages`)} done="purged" />
      <${Destroy} label="Delete topic" name=${topic} says=${`${topic} is removed with its messages, on all brokers.`} act=${async () => {
        await call("DELETE", `/v1/topics/${url(topic)}`);
        go("/ui/topics");
      }} done=${`${topic} is deleted`} /></div><//>
    <${Same} curl=${post(`/v1/topics/${url(topic)}`, { config: { retention_ms: data.config.retention_ms } }, "PATCH")} command=${`topic alter ${shell(topic)} -c retention_ms=${data.config.retention_ms}`} />`;
}

