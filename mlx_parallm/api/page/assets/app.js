// Puts the page together: views, key, theme, and the line that says how the server is.

import { Api, ApiError } from "./api.js";
import { Dashboard } from "./dashboard.js";
import { part, setText } from "./dom.js";
import { amount } from "./format.js";
import { TokenCard } from "./logprobs.js";
import { rate } from "./metrics.js";
import { generates, hears, ModelTable, offerModels, showEngines } from "./models.js";
import { showPeers } from "./peers.js";
import { Playground } from "./playground.js";
import { Polling } from "./polling.js";
import { SessionTable } from "./sessions.js";
import { showTiers } from "./tiers.js";

const THEMES = ["system", "light", "dark"];
const THEME = "mlx-parallm-theme";

class App {
  constructor() {
    this.api = new Api(new URL(".", document.baseURI));
    this.models = [];
    this.reading = null;
    this.isDown = false;
    this.dialog = document.getElementById("key-dialog");
    this.live = document.getElementById("live");
    this.playground = new Playground({
      root: document.getElementById("playground-view"),
      template: document.getElementById("pane"),
      dialog: document.getElementById("chats-dialog"),
      api: this.api,
      card: new TokenCard(),
      announce: (text) => setText(this.live, text),
    });
    this.dashboard = new Dashboard({
      api: this.api,
      root: document.getElementById("charts"),
      modelSelect: document.getElementById("chart-model"),
      onReading: (now, before, error) => this.#onReading(now, before, error),
    });
    const isSeen = () => !document.hidden && !document.getElementById("server-view").hidden;
    const sessions = new SessionTable({ api: this.api, section: document.getElementById("sessions") });
    const peers = document.getElementById("peers");
    this.polled = [
      new Polling({ read: (signal) => this.api.sessions(signal), show: (rows) => sessions.show(rows), isSeen }),
      new Polling({
        read: (signal) => this.api.peers(signal),
        show: (rows) => showPeers(peers, rows),
        // A server without peers has no such metric, and no such route.
        isSeen: () => isSeen() && this.reading?.samples("mlx_parallm:fleet_servers").length > 0,
      }),
    ];
    this.table = new ModelTable({
      api: this.api,
      section: document.getElementById("models-section"),
      reading: () => this.reading,
      isSeen,
      onModels: (models) => this.#offer(models),
    });
  }

  start() {
    this.#wireViews();
    this.#wireTheme();
    this.#wireKey();
    this.#loadModels();
    this.dashboard.run();
    for (const each of this.polled) each.run();
    this.table.run();
    this.playground.focus();
  }

  #wireViews() {
    const show = () => {
      const wanted = location.hash.slice(1) === "server" ? "server" : "playground";
      for (const link of document.querySelectorAll("nav a[data-view]")) {
        const isShown = link.dataset.view === wanted;
        document.getElementById(`${link.dataset.view}-view`).hidden = !isShown;
        if (isShown) link.setAttribute("aria-current", "page");
        else link.removeAttribute("aria-current");
      }
    };
    addEventListener("hashchange", show);
    show();
  }

  #wireTheme() {
    const button = document.getElementById("theme");
    const root = document.documentElement;
    const show = () => {
      const theme = root.dataset.theme ?? "system";
      button.dataset.theme = theme;
      button.setAttribute("aria-label", `Theme: ${theme}`);
      button.title = `Theme: ${theme}`;
    };
    button.addEventListener("click", () => {
      const at = THEMES.indexOf(root.dataset.theme ?? "system");
      const next = THEMES[(at + 1) % THEMES.length];
      if (next === "system") delete root.dataset.theme;
      else root.dataset.theme = next;
      try {
        localStorage.setItem(THEME, next);
      } catch {
        // Storage is turned off: the theme lasts until the page is loaded again.
      }
      show();
    });
    show();
  }

  #wireKey() {
    const field = document.getElementById("key");
    const ask = (isRefused) => {
      const message = this.api.key
        ? "The server refused this key."
        : "This server wants an API key (--api-key).";
      setText(document.getElementById("key-message"), isRefused ? message : "Sent as a bearer token.");
      field.value = this.api.key;
      if (!this.dialog.open) this.dialog.showModal();
      field.select();
    };
    this.api.onUnauthorized = () => ask(true);
    // The focus goes back to where it was, unless that was nowhere.
    this.dialog.addEventListener("close", () => {
      const isNowhere = document.activeElement === document.body;
      if (isNowhere || this.playground.hasFocus) this.playground.focus();
    });
    document.getElementById("key-button").addEventListener("click", () => ask(false));
    document.getElementById("key-cancel").addEventListener("click", () => this.dialog.close());
    document.getElementById("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.api.key = field.value.trim();
      this.dialog.close();
      this.#loadModels();
    });
  }

  async #loadModels() {
    try {
      setText(document.getElementById("version"), await this.api.version());
      this.models = await this.api.models();
    } catch (error) {
      // A missing key is asked for, and the metrics tell whether the server is there.
      if (error instanceof ApiError || error instanceof TypeError) return;
      throw error;
    }
    for (const each of this.polled) each.askAgain();
    this.#offer(this.models);
    this.table.show(this.models);
  }

  #offer(models) {
    this.models = models;
    this.playground.offer(models.filter((model) => generates(model) || hears(model)));
  }

  #onReading(now, before, error) {
    const root = document.getElementById("status");
    root.dataset.state = now ? "up" : "down";
    if (!now) {
      this.isDown = true;
      setText(part(root, "running"), error instanceof ApiError ? error.message : "no connection");
      setText(part(root, "speed"), "");
      return;
    }
    const speed = rate(before, now, "vllm:generation_tokens_total");
    const running = now.sum("vllm:num_requests_running");
    setText(part(root, "running"), `${amount(running)} running`);
    setText(part(root, "speed"), `${amount(speed ?? 0)} tokens/s`);
    offerModels(document.getElementById("chart-model"), now);
    showEngines(document.getElementById("engines"), now);
    showTiers(document.getElementById("tiers"), now, before);
    const isFirst = this.reading === null;
    this.reading = now;
    if (this.isDown) this.#loadModels();
    else if (isFirst) this.table.show(this.models);
    this.isDown = false;
  }
}

new App().start();
