// One message: its content, its biography, and a form to send an edited copy.
import { base64, editable, unpack } from "../exact.js";
import { useEffect, useState } from "../vendor/preact-htm.js";
import { Act, Card, Does, Empty, Fault, Link, Loading, Page, Same, Tag, Value, at, call, duration, html, messageUrl, moment, post, setQuery, shell, url, useAct, useGet, usePlace } from "../lib.js";

const TONES = { acked: "good", dead: "bad", nacked: "warn", expired: "warn", ttl_expired: "warn", purged: "bad", dropped: "bad", cancelled: "bad", delivered: "info", redriven: "info" };

export function Message({ names: [topic, id] }) {
  const { query } = usePlace();
  const [partition, offset] = id.split("-");
  const page = useGet(`/v1/topics/${url(topic)}/partitions/${partition}/messages?offset=${offset}&limit=1`);
  const trace = useGet(`/v1/messages/${url(topic)}/${id}/trace`, 3_000);
  const message = page.data?.messages.find((each) => each.offset === Number(offset)) || trace.data?.message;
  const crumbs = [["Topics", "/ui/topics"], [topic, `/ui/topics/${url(topic)}`]];
  return html`<${Page} title=${id} crumbs=${crumbs} at=${trace.at || page.at}>
    ${!message ? (page.data ? html`<${Empty}>There is no message with this id: it was removed, or the offset is a control record.<//>` : html`<${Loading} of=${page} />`) : html`
      <div class="columns wide-first">
        <div>
          <${Card} title="Value" note=${message.content_type}><${Value} message=${message} /><//>
          <${Card} title="Biography" note="out of the log’s own records"><${Biography} trace=${trace} message=${message} /><//>
        </div>
        <div>
          <${Card} title="Message"><dl class="facts">
            <dt>Topic</dt><dd><${Link} to=${`/ui/topics/${url(topic)}`}>${topic}<//></dd>
            <dt>Partition</dt><dd>${message.partition}</dd><dt>Offset</dt><dd>${message.offset}</dd>
            <dt>Appended</dt><dd><time>${moment(message.timestamp_ms)}</time></dd>
            <dt>Key</dt><dd class="mono">${message.key ?? message.key_base64 ?? html`<span class="muted">none</span>`}</dd>
            ${message.priority ? html`<dt>Priority</dt><dd>${message.priority}</dd>` : null}
            ${message.deliver_at_ms ? html`<dt>Due</dt><dd><time>${moment(message.deliver_at_ms)}</time></dd>` : null}
            ${message.expires_at_ms ? html`<dt>Expires</dt><dd><time>${moment(message.expires_at_ms)}</time></dd>` : null}
          </dl><//>
          <${Card} title="Headers">${Object.keys(message.headers).length ? html`<dl class="facts mono">${Object.entries(message.headers).map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl>` : html`<${Empty}>None.<//>`}<//>
          <${Resend} message=${message} opened=${!!query.edit} onOpen=${() => setQuery({ edit: 1 })} onClose=${() => setQuery({ edit: "" })} />
        </div>
      </div>`}
    <${Same} curl=${at(`/v1/messages/${url(topic)}/${id}/trace`)} command=${`message trace ${shell(topic)} ${id}`} />
  <//>`;
}

function Biography({ trace, message }) {
  if (trace.fault && !trace.data) {
    return html`<ol class="story"><li><i aria-hidden="true"></i><p><${Tag}>appended<//><time>${moment(message.timestamp_ms)}</time></p><p class="hint">offset ${message.offset}</p></li></ol>${trace.fault.status !== 404 && html`<${Fault} fault=${trace.fault} />`}`;
  }
  if (!trace.data) return html`<${Loading} of=${trace} />`;
  let before = null;
  const { replicas, as_of: known, incomplete_below: below } = trace.data;
  return html`<p class="hint">Stored on ${replicas.holders.length === 1 ? "broker" : "brokers"} ${replicas.holders.join(", ")}${replicas.leader === null ? "" : `; broker ${replicas.leader} leads`}. Told by broker ${known.broker}${known.is_leader ? "" : ", a follower"}, up to offset ${known.offset}.${below ? ` Records of groups below ${below} were compacted away.` : ""}</p>
  <ol class="story">${trace.data.events.map((event, at) => {
    const passed = before === null || event.at_ms === undefined ? null : event.at_ms - before;
    before = event.at_ms ?? before;
    return html`<li key=${at} class=${TONES[event.event] || ""}><i aria-hidden="true"></i>
      <p><${Tag} tone=${TONES[event.event]}>${event.event.replaceAll("_", " ")}<//>${event.group && html`<${Link} to=${`/ui/groups/${url(event.group)}`}>${event.group}<//>`}<time>${event.at_ms === undefined ? "" : moment(event.at_ms)}</time>${passed ? html`<span class="muted">+${duration(passed)}</span>` : null}</p>
      <p class="hint">${[event.consumer && `consumer ${event.consumer}`, event.delivery_count && `delivery ${event.delivery_count}`, event.until_ms && `until ${moment(event.until_ms)}`, event.reason && `“${event.reason}”`, event.unseen && "not processed", event.outputs && `published ${event.outputs} in the same commit`, event.broker !== undefined && `broker ${event.broker}`, event.offset !== undefined && `offset ${event.offset}`].filter(Boolean).join(" · ")}${event.to_topic && event.to_id && html` · to <${Link} to=${`/ui/topics/${url(event.to_topic)}/messages/${event.to_id}`}>${event.to_topic} ${event.to_id}<//>`}</p></li>`;
  })}</ol>`;
}

// An edited copy. What is not touched is left out, so that the broker keeps it byte for byte.
export function Resend({ message, label = "Edit and resend", opened = false, onOpen = () => {}, onClose = () => {} }) {
  const [open, setOpen] = useState(opened);
  const [original, setOriginal] = useState(null);
  const [value, setValue] = useState("");
  const [to, setTo] = useState(message.headers["portalmq-source-topic"] || message.topic);
  const [key, setKey] = useState(message.key || "");
  const [run, busy] = useAct();
  const [sent, setSent] = useState(null);
  useEffect(() => {
    if (!open) return;
    run(async () => {
      const path = `/v1/topics/${url(message.topic)}/partitions/${message.partition}/messages?offset=${message.offset}&limit=1`;
      const page = unpack(await call("GET", path, undefined, { headers: { Accept: "application/vnd.portalmq.batch+msgpack" }, bytes: true }));
      const found = page.messages.find((each) => each.offset === message.offset);
      if (!found) throw new Error(`${message.id} is gone from ${message.topic}`);
      const made = editable(found.value, found.content_type ?? "application/octet-stream");
      setOriginal(made);
      setValue(made.text);
    });
  }, [open]);
  const copyOf = () => ({
    to_topic: to,
    ...(key === (message.key || "") ? {} : { key: key || null }),
    ...(original && value !== original.text ? { value_base64: base64(original.bytesOf(value)) } : {}),
  });
  let shown = { to_topic: to };
  try {
    shown = copyOf();
  } catch {
    // what is typed is no JSON yet
  }
  const submit = async (event) => {
    event.preventDefault();
    const result = await run(async () => {
      return call("POST", `/v1/topics/${url(message.topic)}/messages/${message.id}/copy`, copyOf());
    }, (made) => `appended as ${made.id} in ${made.topic}`);
    if (result) setSent(result);
  };
  const close = () => {
    setOpen(false);
    onClose();
  };
  if (!open) return html`<${Act} onClick=${() => {
    setOpen(true);
    onOpen();
  }} data-edit>${label}<//>`;
  return html`<${Card} title=${label}><form onSubmit=${submit}>
    <label>To topic<input value=${to} onInput=${(event) => setTo(event.target.value)} class="mono" required /></label>
    <label>Key<input value=${key} onInput=${(event) => setKey(event.target.value)} class="mono" placeholder=${message.key_base64 ? "bytes, kept" : "none"} /></label>
    <label>Value<textarea rows="8" class="mono" value=${value} disabled=${!original} onInput=${(event) => setValue(event.target.value)} spellcheck="false" data-value></textarea><span class="hint">${original ? `${original.kind}; ` : ""}headers are kept</span></label>
    <div class="row end"><button type="button" onClick=${close}>Close</button><${Act} type="submit" class="primary" disabled=${busy || !original}>Send copy<//></div>
    <${Does} curl=${post(`/v1/topics/${url(message.topic)}/messages/${message.id}/copy`, shown)} command=${`copy ${shell(message.topic)} ${message.id}${to === message.topic ? "" : ` --to ${shell(to)}`}${key === (message.key || "") ? "" : ` -k ${shell(key)}`}${original && value !== original.text ? ` --value ${shell(value)}` : ""}`} />
    ${sent && html`<p>Sent: <${Link} to=${messageUrl(sent)}>${sent.topic} ${sent.id}<//></p>`}
  </form><//>`;
}
