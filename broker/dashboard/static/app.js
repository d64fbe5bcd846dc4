// The frame of all pages: navigation, the address, the state of the stream.
import { html, render, useEffect, useState } from "./vendor/preact-htm.js";
import { Dialog, Empty, Link, Notes, Page, go, here, unescaped, usePlace } from "./lib.js";
import { useStream } from "./stream.js";
import { Api } from "./views/api.js";
import { Cluster } from "./views/cluster.js";
import { DeadLetters } from "./views/dead.js";
import { Group } from "./views/group.js";
import { Groups } from "./views/groups.js";
import { Message } from "./views/message.js";
import { Overview } from "./views/overview.js";
import { Scheduled } from "./views/scheduled.js";
import { Schedule, Schedules } from "./views/schedules.js";
import { Sql } from "./views/sql.js";
import { Topic } from "./views/topic.js";
import { Topics } from "./views/topics.js";

const VIEWS = [
  [/^\/ui\/?$/, Overview],
  [/^\/ui\/topics\/?$/, Topics],
  [/^\/ui\/topics\/([^/]+)\/?$/, Topic],
  [/^\/ui\/topics\/([^/]+)\/messages\/(\d+-\d+)$/, Message],
  [/^\/ui\/groups\/?$/, Groups],
  [/^\/ui\/groups\/([^/]+)\/?$/, Group],
  [/^\/ui\/dead-letters\/?$/, DeadLetters],
  [/^\/ui\/dead-letters\/([^/]+)\/?$/, DeadLetters],
  [/^\/ui\/scheduled\/?$/, Scheduled],
  [/^\/ui\/schedules\/?$/, Schedules],
  [/^\/ui\/schedules\/([^/]+)\/?$/, Schedule],
  [/^\/ui\/cluster\/?$/, Cluster],
  [/^\/ui\/sql\/?$/, Sql],
  [/^\/ui\/api\/?$/, Api],
];

const MENU = [
  ["Overview", "/ui/", "o"],
  ["Topics", "/ui/topics", "t"],
  ["Groups", "/ui/groups", "g"],
  ["Dead letters", "/ui/dead-letters", "d"],
  ["Scheduled", "/ui/scheduled", "s"],
  ["Recurring", "/ui/schedules", "r"],
  ["Cluster", "/ui/cluster", "c"],
  ["SQL", "/ui/sql", "q"],
  ["API", "/ui/api", "a"],
];

const KEYS = [["/", "search"], ...MENU.map(([name, , key]) => [`g ${key}`, name]), ["?", "these keys"], ["Esc", "close"]];

// Keys: g and a letter go to a page, / goes to the search, ? tells of the keys.
function useKeys(tell) {
  useEffect(() => {
    let before = "";
    const pressed = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
      const to = before === "g" && MENU.find(([, , key]) => key === event.key);
      before = event.key;
      if (to) {
        tell(false);
        go(to[1]);
        before = "";
      } else if (event.key === "/") {
        const field = document.querySelector("[data-search]");
        if (field) {
          event.preventDefault();
          field.focus();
        }
      } else if (event.key === "?") tell(true);
    };
    document.addEventListener("keydown", pressed);
    return () => document.removeEventListener("keydown", pressed);
  }, []);
}

function Live() {
  const { state } = useStream();
  const said = { live: "live", lost: "reconnecting", connecting: "connecting" }[state];
  return html`<span class=${`live ${state}`} role="status"><i aria-hidden="true"></i>${said}</span>`;
}

function App() {
  const { path } = usePlace();
  const [keys, showKeys] = useState(false);
  useKeys(showKeys);
  useEffect(() => {
    // On a phone the menu is one line, which scrolls.
    const nav = document.querySelector(".side nav");
    const link = nav.querySelector("[aria-current]");
    if (link) nav.scrollLeft = link.offsetLeft - (nav.clientWidth - link.clientWidth) / 2;
  }, [path]);
  const found = VIEWS.map(([pattern, view]) => [pattern.exec(path), view]).find(([match]) => match);
  const is = (to) => (to === "/ui/" ? path === "/ui/" || path === "/ui" : path === to || path.startsWith(`${to}/`));
  return html`<a class="skip" href="#main">To the content</a>
    <aside class="side">
      <p class="brand"><${Link} to="/ui/"><svg viewBox="0 0 32 32" width="24" height="24" aria-hidden="true"><rect width="32" height="32" rx="7" /><path d="M8 9.5h10.5a5.5 5.5 0 0 1 0 11H13M8 15h9" /><circle cx="23.5" cy="24" r="2.5" /></svg>PortalMQ<//></p>
      <nav aria-label="Pages"><ul>${MENU.map(([name, to]) => html`<li><${Link} to=${to} aria-current=${is(to) ? "page" : undefined}>${name}<//></li>`)}</ul></nav>
      <footer>
        <${Live} />
        <span>broker ${here.broker}</span>
        <span class="version">${here.version}</span>
        ${here.hasToken && html`<span>${here.mayWrite ? "signed in" : "read-only"}</span><form method="post" action="/ui/logout"><button class="quiet">Sign out</button></form>`}
      </footer>
    </aside>
    <main id="main" key=${path}>${found ? html`<${found[1]} names=${found[0].slice(1).map(unescaped)} />` : html`<${Page} title="Not found"><${Empty}>There is no page at ${unescaped(path)}.<//><//>`}</main>
    <${Dialog} title="Keys" open=${keys} onClose=${() => showKeys(false)}><dl class="keys">${KEYS.map(([key, says]) => html`<dt>${key.split(" ").map((each) => html`<kbd>${each}</kbd> `)}</dt><dd>${says}</dd>`)}</dl>
      <form method="dialog"><div class="row end"><button>Close</button></div></form><//>
    <${Notes} />`;
}

// Links within the dashboard change the address without loading a page.
document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href]");
  if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  const to = new URL(link.href);
  if (to.origin !== location.origin || !/^\/ui(\/|$)/.test(to.pathname) || link.target || link.download || link.hash) return;
  event.preventDefault();
  go(to.pathname + to.search);
});

const root = document.getElementById("app");
root.replaceChildren();
render(html`<${App} />`, root);
