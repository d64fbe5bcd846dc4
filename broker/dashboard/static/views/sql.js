// SQL over the segment files of this broker.
import { useState } from "../vendor/preact-htm.js";
import { Act, Card, Page, Same, Table, call, csv, download, go, here, html, number, post, shell, useAct, usePlace, withQuery } from "../lib.js";

const EXAMPLES = [
  ["newest messages of a topic", "SELECT offset, datetime(timestamp_ms / 1000, 'unixepoch') AS at, key, value\nFROM messages\nWHERE topic = 'orders' AND partition = 0\nORDER BY offset DESC LIMIT 20"],
  ["messages a minute", "SELECT topic, datetime(timestamp_ms / 60000 * 60, 'unixepoch') AS minute, count(*) AS messages\nFROM messages GROUP BY 1, 2 ORDER BY 2 DESC LIMIT 60"],
  ["inside the JSON", "SELECT key, avg(json_extract(value, '$.value')) AS average, count(*) AS messages\nFROM messages WHERE content_type = 'application/json'\nGROUP BY key ORDER BY messages DESC LIMIT 50"],
  ["why messages were given back", "SELECT topic, group_name, json_extract(body, '$[2]') AS reason, count(*) AS times\nFROM group_records WHERE name = 'nack' GROUP BY 1, 2, 3 ORDER BY times DESC"],
  ["batch sizes", "SELECT topic, kind, count(*) AS batches, avg(count) AS average, max(count) AS largest\nFROM batches GROUP BY 1, 2"],
];
const TABLES = [
  ["messages", "topic, partition, offset, key, value, headers, timestamp_ms, deliver_at_ms, expires_at_ms, priority, content_type"],
  ["batches", "topic, partition, base_offset, count, messages_before, kind, leader_epoch, producer_id, producer_epoch, sequence, appended_at_ms, crc"],
  ["group_records", "topic, partition, offset, kind, name, group_name, appended_at_ms, body"],
];

const shown = (value) => (value === null ? "NULL" : typeof value === "object" ? value.base64 : String(value));
export function Sql() {
  const { query } = usePlace();
  const [text, setText] = useState(query.q || EXAMPLES[1][1]);
  const [found, setFound] = useState(null);
  const [fault, setFault] = useState(null);
  const [run, busy] = useAct();
  const ask = (event) => {
    event?.preventDefault();
    go(withQuery("/ui/sql", { q: text }), { replace: true });
    return run(async () => {
      setFault(null);
      try {
        setFound({ ...(await call("POST", "/v1/sql", { query: text })), when: new Date() });
      } catch (refused) {
        setFound(null);
        setFault(refused.message);
      }
    });
  };
  const keys = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask(event);
  };
  const names = () => found.columns.map((name, index) => (found.columns.indexOf(name) < index ? `${name}:${index}` : name));
  const json = () => JSON.stringify(found.rows.map((row) => Object.fromEntries(names().map((name, index) => [name, row[index]]))), null, 1);
  return html`<${Page} title="SQL" at=${found?.when}>
    <p class="lead">One SELECT over the segment files of broker ${here.broker}, read-only, in a process of its own. Name a topic and a partition to make it fast.</p>
    <form onSubmit=${ask}><textarea class="mono editor" rows="7" aria-label="Query" value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${keys} spellcheck="false" data-query></textarea>
      <div class="row"><${Act} type="submit" class="primary" disabled=${busy}>${busy ? "Runs…" : "Run"}<//><span class="hint"><kbd>Ctrl</kbd> <kbd>Enter</kbd></span>
        ${found && html`<span class="hint grow">${number(found.rows.length)} ${found.rows.length === 1 ? "row" : "rows"}${found.truncated ? ", there are more" : ""} in ${found.elapsed_ms} ms</span><button type="button" class="quiet" onClick=${() => download("result.csv", csv([found.columns, ...found.rows]), "text/csv")}>CSV</button><button type="button" class="quiet" onClick=${() => download("result.json", json(), "application/json")}>JSON</button>`}
      </div></form>
    ${fault && html`<p class="alert" role="alert">${fault}</p>`}
    ${found && html`<${Card} flush><${Table} label="Result" rows=${found.rows} empty="No row." columns=${found.columns.map((name, index) => ({ name, number: typeof found.rows[0]?.[index] === "number", of: (row) => html`<span class=${`mono cut${row[index] === null ? " muted" : ""}`}>${shown(row[index])}</span>` }))} /><//>`}
    <div class="columns"><${Card} title="Tables"><dl class="tables">${TABLES.map(([name, columns]) => html`<dt class="mono">${name}</dt><dd class="mono">${columns}</dd>`)}</dl><//>
      <${Card} title="Examples"><ul class="plain">${EXAMPLES.map(([name, example]) => html`<li><button class="link" onClick=${() => setText(example)}>${name}</button></li>`)}</ul><//></div>
    <${Same} curl=${post("/v1/sql", { query: text })} command=${`sql ${shell(text)}`} />
  <//>`;
}
