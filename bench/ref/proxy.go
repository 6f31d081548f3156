package main

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httputil"
	"net/url"
	"sync"
	"sync/atomic"
)

// gate is the least a gate in Go has to do per request: read the body to learn the model, count the request
// in and out, and hand it to the standard library's reverse proxy, which flushes every write.
type gate struct {
	relay    httputil.ReverseProxy
	inflight sync.Map // model -> *atomic.Int64
}

func proxy(addr, upstream string, pool bool) error {
	target, err := url.Parse(upstream)
	if err != nil {
		return err
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.Proxy = nil
	transport.MaxIdleConns = 0 // no limit
	transport.MaxIdleConnsPerHost = 4096
	transport.DisableCompression = true
	transport.ForceAttemptHTTP2 = false
	g := &gate{relay: httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(target)
			r.Out.Host = r.In.Host
		},
		Transport:     transport,
		FlushInterval: -1,
	}}
	if pool {
		g.relay.BufferPool = &buffers{sync.Pool{New: func() any { return make([]byte, 32<<10) }}}
	}
	return http.ListenAndServe(addr, g)
}

func (g *gate) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var wanted struct {
		Model string `json:"model"`
	}
	if r.Method == http.MethodPost {
		body, err := io.ReadAll(r.Body)
		if err != nil || json.Unmarshal(body, &wanted) != nil {
			http.Error(w, "unreadable body", http.StatusBadRequest)
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		r.ContentLength = int64(len(body))
	}
	entry, ok := g.inflight.Load(wanted.Model)
	if !ok {
		entry, _ = g.inflight.LoadOrStore(wanted.Model, new(atomic.Int64))
	}
	count := entry.(*atomic.Int64)
	count.Add(1)
	defer count.Add(-1)
	g.relay.ServeHTTP(w, r)
}

// buffers lets the relay use its copy buffers again. Without it, which is the default, each response allocates
// 32 KiB, and the garbage collector has more to do.
type buffers struct{ pool sync.Pool }

func (b *buffers) Get() []byte  { return b.pool.Get().([]byte) }
func (b *buffers) Put(p []byte) { b.pool.Put(p) }
