// The way to the API's own description.
import { Card, Page, Same, at, html, here } from "../lib.js";

export function Api() {
  return html`<${Page} title="API">
    <p class="lead">Everything these pages show and do is done by the HTTP API of this broker, at <code>${location.origin}</code>. The command below each page is the same call.</p>
    <div class="columns">
      <${Card} title="Reference"><p><a href="/docs">All routes, with their types, errors and examples</a>, and <a href="/openapi.json">the OpenAPI document</a> they are made from.</p><//>
      <${Card} title="Metrics"><p><a href="/metrics">Prometheus’ text format</a>: every counter and gauge of broker ${here.broker}.</p><//>
    </div>
    <${Card} title="Try it"><dl class="facts"><dt>Send</dt><dd><code>curl -X POST ${location.origin}/v1/topics/hello/messages -d 'a message'</code></dd>
      <dt>Receive</dt><dd><code>curl -X POST ${location.origin}/v1/groups/me/receive -d '${'{"topics":["hello"],"wait_ms":5000}'}'</code></dd>
      <dt>Follow</dt><dd><code>curl -N -H 'Accept: text/event-stream' ${location.origin}/v1/topics/hello/partitions/0/messages</code></dd></dl><//>
    <${Same} curl=${at("/openapi.json")} />
  <//>`;
}
