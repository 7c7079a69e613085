// The live page: pieces of the bundle as they are made, what the server is doing, and what went wrong.
"use strict";

class Live {
  /** `ready` is called when there is enough to show for the first time. */
  constructor(store, ready) {
    this.store = store;
    this.ready = ready;
    this.waiting = {};
    this.state = document.getElementById("state");
    this.trouble = document.getElementById("trouble");
    this.state.hidden = false;
    this.say("busy", "recording the network…");
    this.source = new EventSource("events");
    this.source.onmessage = (event) => this.take(JSON.parse(event.data));
    this.source.onerror = () => this.say("broken", "the server is gone; trying again");
  }

  say(kind, words) {
    this.state.className = `state ${kind}`;
    this.state.replaceChildren(make("i"), words);
  }

  take(message) {
    if (message.pieces) this.pieces(message.pieces);
    if (message.status) this.say(message.status.kind, message.status.text);
    if (message.trouble !== undefined) this.show(message.trouble);
  }

  /** Put pieces in their places; the network's own come together, because panels read several of them. */
  pieces(pieces) {
    const { store } = this, { about, graph } = store.data, network = Boolean(pieces.about);
    const other = network && about && (pieces.about.batch !== about.batch || pieces.about.image !== about.image || pieces.graph.fingerprint !== graph.fingerprint);
    if (network) {
      delete store.data.plans;
      delete store.data.sizes;
      delete store.data.predicted_run;
      store.hand = null;
      store.measured.clear();
      if (other) Object.assign(store, { batch: null, image: null });
    }
    Object.assign(store.data, pieces);
    store.begin();
    if (network) return this.ready();
    for (const name of Object.keys(pieces)) store.emit("piece", { name });
  }

  show(trouble) {
    this.trouble.hidden = trouble === null;
    if (trouble === null) return this.trouble.replaceChildren();
    const where = trouble.place ? make("code", {}, trouble.place) : "";
    this.trouble.replaceChildren(
      make("div.what", {}, make("b", {}, trouble.kind), " ", where, make("div", {}, trouble.message.replace(new RegExp(`^${trouble.kind} `), "")),
        trouble.trace ? make("details", {}, make("summary", {}, "traceback"), make("pre", {}, trouble.trace)) : ""),
      make("span.note", {}, this.store.data.about ? "What is shown is the last state that worked." : "Save the file again when it is mended."));
    if (!this.store.data.about) document.querySelector(".waiting b")?.replaceChildren("The job cannot be looked at yet");
  }
}
