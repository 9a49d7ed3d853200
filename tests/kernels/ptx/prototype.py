"""Lane-exact-ish PTX emulator: a CTA at a time, vectorised over threads, min-pc scheduling."""
import re, numpy as np
from tests.kernels.ptx.errors import BoundsError, EmulatorError
np.seterr(all='ignore')
U=np.uint64
SPLIT=re.compile(r'\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*')
class Mem:
    def __init__(s,size=1<<28): s.b=np.zeros(size,np.uint8); s.top=4096
    def put(s,a):
        a=np.ascontiguousarray(a); s.top=(s.top+511)//512*512; at=s.top
        s.b[at:at+a.nbytes]=a.reshape(-1).view(np.uint8); s.top+=a.nbytes+64; return at
    def get(s,at,like): 
        n=like.nbytes; return s.b[at:at+n].view(like.dtype).reshape(like.shape).copy()
def parse(ptx):
    body=ptx[ptx.index('{',ptx.index(')',ptx.index('.entry'))):]
    params=re.findall(r'\.param \.(\w+)[^,\n]*?(\w+_param_\d+)',ptx[:ptx.index('{',ptx.index('.entry'))])
    ins=[];labels={}
    for line in body.splitlines():
        line=line.split('//')[0].strip()
        if not line or line.startswith('.'): continue
        if re.match(r'^\$L_?\w+:$',line): labels[line[:-1]]=len(ins); continue
        # asm block braces: a leading { before .reg
        line=re.sub(r'^\{\s*\.reg','.reg',line); 
        for st in line.split(';'):
            st=st.strip()
            if st in('','}','{'): continue
            if st.startswith('.'): continue
            m=re.match(r'^(@!?%p\d+)?\s*([a-z][a-z0-9_.:]*)\s*(.*)$',st,re.S)
            assert m,repr(st)
            ins.append((m[1],m[2],[x.strip() for x in SPLIT.findall(m[3])],st))
    return params,ins,labels
def f32(x): return (x&U(0xffffffff)).astype(np.uint32).view(np.float32)
def uf32(x): return x.astype(np.float32).view(np.uint32).astype(U)
def bf(x): return ((x&U(0xffff)).astype(np.uint32)<<16).view(np.float32)
def tobf(x):
    x=np.asarray(x,np.float32).view(np.uint32); r=(x+0x7fff+((x>>16)&1))>>16
    n=(x&0x7fffffff)>0x7f800000
    return np.where(n,0x7fff,r&0xffff).astype(U)
def hf(x): return (x&U(0xffff)).astype(np.uint16).view(np.float16)
def tohf(x): return np.asarray(x).astype(np.float16).view(np.uint16).astype(U)
def typed(x,t):
    k,n=t[0],int(re.sub(r'\D','',t))
    if t=='f32': return f32(x)
    if t=='f64': return x.view(np.float64)
    if t=='f16': return hf(x)
    if t=='bf16': return bf(x)
    dt={8:np.uint8,16:np.uint16,32:np.uint32,64:np.uint64}[n]
    v=x.astype(dt) if n<64 else x
    return v.view({8:np.int8,16:np.int16,32:np.int32,64:np.int64}[n]) if k=='s' else v
def raw(v,t):
    if t=='f32': return uf32(v)
    if t=='f64': return v.astype(np.float64).view(U)
    if t=='f16': return tohf(v)
    if t=='bf16': return tobf(v)
    n=int(re.sub(r'\D','',t)); dt={8:np.uint8,16:np.uint16,32:np.uint32,64:np.uint64}[n]
    sd={8:np.int8,16:np.int16,32:np.int32,64:np.int64}[n]
    v=np.asarray(v)
    if v.dtype!=dt: v=v.astype(sd).view(dt) if t[0]=='s' else v.astype(np.int64).astype(dt) if v.dtype.kind=='i' else v.astype(dt)
    return v.astype(U)
class Emu:
    def __init__(s,ptx,mem,warps): 
        s.params,s.ins,s.labels=parse(ptx); s.m=mem; s.T=32*warps; s.count=0; s.unwritten=0
    def launch(s,grid,args,ctas=None):
        assert len(args)>=len(s.params)-2,(len(args),len(s.params))
        g=(list(grid)+[1,1])[:3]
        for z in range(g[2]):
            for y in range(g[1]):
                for x in range(g[0]):
                    if ctas is None or (x,y,z) in ctas: s.cta((x,y,z),g,args)
    def val(s,o):
        R=s.R
        if o in R: return R[o]
        if o.startswith('%'):
            T=s.T;lane=np.arange(T)
            sp={'%tid.x':lane,'%ctaid.x':np.full(T,s.ct[0]),'%ctaid.y':np.full(T,s.ct[1]),'%ctaid.z':np.full(T,s.ct[2]),
                '%nctaid.x':np.full(T,s.g[0]),'%nctaid.y':np.full(T,s.g[1]),'%nctaid.z':np.full(T,s.g[2]),'%laneid':lane%32}
            if o in sp: return sp[o].astype(U)
            if o.startswith('%p'): return np.zeros(s.T,bool)
            return np.zeros(s.T,U)
        if o=='global_smem': return np.zeros(s.T,U)
        if o[:2] in('0f','0d'): return np.full(s.T,int(o[2:],16),U)
        o=o.rstrip('U')
        return np.full(s.T,int(o,0)&0xffffffffffffffff,U)
    def addr(s,o):
        o=o.strip('[] '); b,_,off=o.partition('+')
        a=s.val(b.strip()).view(np.int64); 
        return a+(int(off.strip(),0) if off else 0)
    def set(s,d,v,m):
        if d in('_',): return
        old=s.R.get(d)
        if old is None: old=np.zeros(s.T,v.dtype)
        s.R[d]=np.where(m,v,old)
    def cta(s,ct,g,args):
        s.ct,s.g=ct,g; T=s.T; s.R={}; s.sm=np.full(1<<17,0xCD,np.uint8)
        pc=np.zeros(T,np.int64); done=np.zeros(T,bool); wait=np.zeros(T,bool)
        args=list(args)+[0]*8
        P={n:int(a) if not isinstance(a,float) else int(np.float32(a).view(np.uint32)) for (t,n),a in zip(s.params,args)}
        n=len(s.ins)
        while not done.all():
            live=~done&~wait
            if not live.any(): wait[:]=False; continue
            p=pc[live].min(); m=live&(pc==p)
            pred,op,a,text=s.ins[p]; s.count+=1
            pc[m]+=1
            if pred:
                c=s.R.get(pred.lstrip('@!')); c=np.zeros(T,bool) if c is None else c
                m=m&(~c if pred[1]=='!' else c)
            o=op.split('.'); h=o[0]; t=o[-1]
            if h=='bra': pc[m]=s.labels[a[0]]; continue
            if h=='ret': done|=m; continue
            if not m.any(): continue
            if h in('bar','barrier'):
                if 'warp' in op: continue
                wait|=m; continue
            try: s.ex(h,o,t,a,m,P,text)
            except EmulatorError: raise
            except Exception as e: raise EmulatorError(text) from e
    def ex(s,h,o,t,a,m,P,text):
        V=s.val
        if h=='ld' or h=='st': return s.ldst(h,o,t,a,m,P,text)
        if h=='cp':
            if 'commit_group' in o or any(x.startswith('wait') for x in o): return
            d=s.addr(a[0]); src=s.addr(a[1]); n=int(a[2],0); k=s.val(a[3]).astype(np.int64) if len(a)>3 else np.full(s.T,n)
            for i in np.nonzero(m)[0]:
                s.sm[d[i]:d[i]+n]=0; kk=int(k[i]); 
                if kk: s.sm[d[i]:d[i]+kk]=s.m.b[src[i]:src[i]+kk]
            return
        if h=='mov':
            if t=='pred': return s.set(a[0],np.full(s.T,int(a[1])!=0) if not a[1].startswith('%') else V(a[1]),m)
            if a[0].startswith('{'):
                ds=[x.strip() for x in a[0].strip('{}').split(',')]; v=V(a[1]); w=64//len(ds) if t[1:]=='64' else 32//len(ds)
                for i,d in enumerate(ds): s.set(d,(v>>U(w*i))&U((1<<w)-1),m)
                return
            if a[1].startswith('{'):
                xs=[x.strip() for x in a[1].strip('{}').split(',')]; w=int(t[1:])//len(xs); v=np.zeros(s.T,U)
                for i,x in enumerate(xs): v|=(V(x)&U((1<<w)-1))<<U(w*i)
                return s.set(a[0],v,m)
            v=V(a[1]); n=int(t[1:]); return s.set(a[0],v&U((1<<n)-1),m)
        if h=='mma': return s.mma(o,a,m)
        if h in('ldmatrix','stmatrix'): return s.matrix(h,o,a,m)
        if h=='wgmma': return s.wgmma(o,a,m) if 'mma_async' in o else None
        if h=='fence': return
        if h=='shfl': return s.shfl(o,a,m)
        if h=='cvt': return s.cvt(o,a,m)
        if h=='setp': return s.setp(o,t,a,m)
        if h=='selp': return s.set(a[0],np.where(V(a[3]),V(a[1]),V(a[2])),m)
        if t=='pred':
            x=[V(z) for z in a[1:]]
            x=[z if z.dtype==bool else z!=0 for z in x]
            return s.set(a[0],{'and':lambda:x[0]&x[1],'or':lambda:x[0]|x[1],'xor':lambda:x[0]^x[1],'not':lambda:~x[0]}[h](),m)
        if h in('and','or','xor','not'):
            n=int(t[1:]);x=[V(z) for z in a[1:]]
            v={'and':lambda:x[0]&x[1],'or':lambda:x[0]|x[1],'xor':lambda:x[0]^x[1],'not':lambda:~x[0]}[h]()
            return s.set(a[0],v&U((1<<n)-1),m)
        if h=='lop3':
            A,B,C=[V(z)&U(0xffffffff) for z in a[1:4]]; k=int(a[4],0); v=np.zeros(s.T,U)
            for i in range(8):
                if k>>i&1: v|=(A if i&4 else ~A)&(B if i&2 else ~B)&(C if i&1 else ~C)
            return s.set(a[0],v&U(0xffffffff),m)
        if h in('shl','shr'):
            n=int(t[1:]); x=typed(V(a[1]),t); c=(V(a[2])&U(0xffffffff))
            if h=='shl': v=np.where(c>=n,U(0),(V(a[1])<<np.minimum(c,U(63)))&U((1<<n)-1))
            elif t[0]=='s': v=raw(x>>np.minimum(c,U(n-1)).astype(x.dtype),t)
            else: v=np.where(c>=n,U(0),(V(a[1])&U((1<<n)-1))>>np.minimum(c,U(63)))
            return s.set(a[0],v,m)
        if h=='shf':
            lo,hi,c=V(a[1])&U(0xffffffff),V(a[2])&U(0xffffffff),V(a[3])&U(31)
            full=(hi<<U(32))|lo
            v=(full>>(U(32)-c)) if o[1]=='l' else full>>c
            return s.set(a[0],v&U(0xffffffff),m)
        if h=='bfe':
            x=V(a[1])&U(0xffffffff);p=V(a[2])&U(255);l=V(a[3])&U(255)
            v=(x>>p)&((U(1)<<l)-U(1))
            if t=='s32':
                sign=(x>>np.minimum(p+l-U(1),U(31)))&U(1); v=np.where(sign>0,v|(U(0xffffffff)&~((U(1)<<l)-U(1))),v)
            return s.set(a[0],v,m)
        if h=='prmt':
            x=(V(a[1])&U(0xffffffff))|((V(a[2])&U(0xffffffff))<<U(32)); k=V(a[3]); v=np.zeros(s.T,U)
            for i in range(4):
                q=(k>>U(4*i))&U(15); b=(x>>((q&U(7))*U(8)))&U(255)
                b=np.where(q&U(8)>0,np.where(b&U(128)>0,U(255),U(0)),b); v|=b<<U(8*i)
            return s.set(a[0],v,m)
        if t in('f16x2','bf16x2'):
            g,p=(bf,tobf) if t=='bf16x2' else (hf,tohf)
            x=[V(z) for z in a[1:]]; out=np.zeros(s.T,U)
            for i in(0,1):
                y=[g((z>>U(16*i))&U(0xffff)).astype(np.float64) for z in x]
                r={'fma':lambda:y[0]*y[1]+y[2],'add':lambda:y[0]+y[1],'mul':lambda:y[0]*y[1],'abs':lambda:abs(y[0]),'sub':lambda:y[0]-y[1]}[h]()
                out|=p(r.astype(np.float32) if t=='bf16x2' else r)<<U(16*i)
            return s.set(a[0],out,m)
        if t=='f32x2':
            x=[V(z) for z in a[1:]]; out=np.zeros(s.T,U)
            for i in(0,1):
                y=[f32(z>>U(32*i)) for z in x]; y64=[z.astype(np.float64) for z in y]
                r={'fma':lambda:(y64[0]*y64[1]+y64[2]),'add':lambda:y[0]+y[1],'mul':lambda:y[0]*y[1],'sub':lambda:y[0]-y[1]}[h]()
                out|=uf32(r)<<U(32*i)
            return s.set(a[0],out,m)
        if h=='redux':
            if o[2] in('xor','or','and'):
                x=(V(a[1])&U(0xffffffff)).reshape(-1,32); r=np.repeat({'xor':np.bitwise_xor,'or':np.bitwise_or,'and':np.bitwise_and}[o[2]].reduce(x,axis=1),32); return s.set(a[0],r,m)
            x=typed(V(a[1]),t).reshape(-1,32); f={'add':x.sum,'max':x.max,'min':x.min}[o[2]]
            r=np.repeat(f(axis=1),32); return s.set(a[0],raw(r.astype(x.dtype),t),m)
        if h=='popc': return s.set(a[0],np.array([bin(int(z)).count('1') for z in V(a[1])],U),m)
        if h in('atom','red'): return s.atom(h,o,t,a,m)
        if len(o)>2 and o[-2]=='f32' and t in('f16','bf16') and h in('add','sub','fma'):
            g=hf if t=='f16' else bf; x=[g(V(z)).astype(np.float64) for z in a[1:-1]]+[f32(V(a[-1])).astype(np.float64)]
            r={'add':lambda:x[0]+x[1],'sub':lambda:x[0]-x[1],'fma':lambda:x[0]*x[1]+x[2]}[h]()
            return s.set(a[0],uf32(r),m)
        # arithmetic
        if h in('mul','mad') and o[1] in('wide','lo','hi'):
            x=[typed(V(z),t) for z in a[1:3]]; n=int(t[1:])
            big=np.int64 if t[0]=='s' else U
            r=x[0].astype(big)*x[1].astype(big)
            if o[1]=='hi': assert n==32; r=r>>big(32); r=r.view(U)&U(0xffffffff)
            elif o[1]=='wide': r=r.view(U)
            else: r=r.view(U)&U((1<<n)-1)
            if h=='mad': 
                w=64 if o[1]=='wide' or n==64 else 32; r=(r+V(a[3]))&U((1<<w)-1)
            return s.set(a[0],r,m)
        x=[typed(V(z),t) for z in a[1:]]
        if h=='fma' and t=='f32': r=(x[0].astype(np.float64)*x[1].astype(np.float64)+x[2].astype(np.float64)).astype(np.float32)
        elif h=='add': r=x[0]+x[1]
        elif h=='sub': r=x[0]-x[1]
        elif h=='mul': r=x[0]*x[1]
        elif h=='fma': r=x[0]*x[1]+x[2]
        elif h=='neg': r=-x[0]
        elif h=='abs': r=abs(x[0])
        elif h=='max':
            r=np.fmax(x[0],x[1]) if t[0]=='f' else np.maximum(x[0],x[1])
            if len(x)>2: r=np.fmax(r,x[2])
        elif h=='min':
            r=np.fmin(x[0],x[1]) if t[0]=='f' else np.minimum(x[0],x[1])
            if len(x)>2: r=np.fmin(r,x[2])
            if 'relu' in o: r=np.maximum(r,0)
        elif h=='div':
            if t[0]=='f': r=x[0]/x[1]
            else: r=np.where(x[1]!=0,(np.trunc(x[0].astype(np.float64)/np.where(x[1]==0,1,x[1]))).astype(np.int64),0).astype(x[0].dtype)
        elif h=='rem': r=np.fmod(x[0],x[1])
        elif h=='ex2': r=np.exp2(x[0])
        elif h=='lg2': r=np.log2(x[0])
        elif h=='rsqrt': r=(1/np.sqrt(x[0].astype(np.float64))).astype(np.float32)
        elif h=='sqrt': r=np.sqrt(x[0])
        elif h=='rcp': r=np.float32(1)/x[0]
        else: raise EmulatorError('unknown '+text)
        s.set(a[0],raw(r,t),m)
    def setp(s,o,t,a,m):
        c=o[1]
        if t in('f16x2','bf16x2'):
            d=a[0].split('|'); g=hf if t=='f16x2' else bf
            for i,dd in enumerate(d):
                x=[g((s.val(z)>>U(16*i))&U(0xffff)) for z in a[1:3]]; s.set(dd.strip(),s.cmp(c,x[0],x[1],True),m)
            return
        x=[typed(s.val(z),t if t[0]!='b' else 'u'+t[1:]) for z in a[1:3]]
        s.set(a[0],s.cmp(c,x[0],x[1],t[0]=='f'),m)
    def cmp(s,c,x,y,fl):
        un=fl and len(c)>2 and c.endswith('u'); b=c[:2]
        if c in('num','nan'): r=np.isnan(x)|np.isnan(y); return r if c=='nan' else ~r
        r={'eq':x==y,'ne':x!=y,'lt':x<y,'le':x<=y,'gt':x>y,'ge':x>=y}[b]
        if fl:
            nan=np.isnan(x)|np.isnan(y); r=(r|nan) if un else (r&~nan)
        return r
    def cvt(s,o,a,m):
        d,f=o[-2],o[-1]
        if d=='bf16x2' or d=='f16x2':
            p=tobf if d[0]=='b' else tohf
            hi,lo=f32(s.val(a[1])),f32(s.val(a[2])); return s.set(a[0],p(lo)|(p(hi)<<U(16)),m)
        x=typed(s.val(a[1]),f)
        if f[0]in'fb' and d[0] in 'su':
            v=np.nan_to_num(np.trunc(x.astype(np.float64)) if 'rzi' in o else np.rint(x.astype(np.float64)))
            n=int(d[1:]); lim=(-(2.**(n-1)),2.**(n-1)-1) if d[0]=='s' else (0,2.**n-1)
            if n==64: r=np.clip(v,-9.2233720368547e18,9.2233720368547e18).astype(np.int64).view(U)
            else: r=raw(np.clip(v,*lim).astype(np.int64),d)
            return s.set(a[0],r,m)
        if d[0] in'fb': return s.set(a[0],raw(x.astype(np.float64) if f not in('f32',) else x,d) if not(d=='f32' and f[0] in'su') else uf32(x.astype(np.float32)),m)
        # int to int: sign extend by source type
        v=x.astype(np.int64).view(U) if f[0]=='s' else x.astype(U)
        n=int(d[1:]); s.set(a[0],v&U((1<<n)-1),m)
    def ldst(s,h,o,t,a,m,P,text):
        n=int(t[1:])//8
        if 'param' in o:
            return s.set(a[0],np.full(s.T,P[a[1].strip('[] ')]&0xffffffffffffffff,U),m)
        sh=any(x.startswith('shared') for x in o); buf=s.sm if sh else s.m.b
        mo,ro=(a[1],a[0]) if h=='ld' else (a[0],a[1])
        ad=s.addr(mo)[m]; regs=[x.strip() for x in ro.strip('{}').split(',')]
        if len(ad) and (ad.min()<0 or ad.max()+n*len(regs)>len(buf) or (not sh and ad.min()<4096)): raise BoundsError(f'{text}: bad address {ad.min()} {ad.max()} sh={sh} {o} {a}')
        if (ad%(n*len(regs))).any(): raise BoundsError(f'{text}: misaligned {o} {a} {ad[:4]}')
        dt={1:np.uint8,2:np.uint16,4:np.uint32,8:np.uint64}[n]; w=buf.view(dt)
        for i,r in enumerate(regs):
            ix=(ad+i*n)//n
            if h=='ld':
                full=np.zeros(s.T,U); full[m]=w[ix].astype(U); s.set(r,full,m)
            else: w[ix]=s.val(r)[m].astype(dt)
    def atom(s,h,o,t,a,m):
        sh='shared' in o; mo=a[1] if h=='atom' else a[0]; v=s.val(a[-1]); ad=s.addr(mo); w=(s.sm if sh else s.m.b).view(np.uint32); out=np.zeros(s.T,U)
        for i in np.nonzero(m)[0]:
            k=ad[i]//4; out[i]=w[k]; w[k]=np.uint32((int(w[k])+int(v[i]))&0xffffffff)
        if h=='atom': s.set(a[0],out,m)
    def shfl(s,o,a,m):
        src=s.val(a[1]); b=s.val(a[2]).astype(np.int64); c=s.val(a[3]).astype(np.int64)
        lane=np.arange(s.T)%32; base=np.arange(s.T)-lane
        d=a[0].split('|'); 
        mode=o[2]
        if mode=='bfly': j=lane^b
        elif mode=='idx': j=b&31
        elif mode=='up': j=lane-b
        elif mode=='down': j=lane+b
        ok=(j>=0)&(j<32); 
        jj=np.where(ok,j,lane); s.set(d[0].strip(),src[base+jj],m)
        if len(d)>1: s.set(d[1].strip(),ok,m)
        assert m.reshape(-1,32).all(1).any() and (m.reshape(-1,32).all(1)==m.reshape(-1,32).any(1)).all(),'shfl in diverged warp'
    def matrix(s,h,o,a,m):
        n=int([z for z in o if re.match(r'x\d',z)][0][1:]); tr='trans' in o
        mo,ro=(a[1],a[0]) if h=='ldmatrix' else (a[0],a[1])
        regs=[x.strip() for x in ro.strip('{}').split(',')]; ad=s.addr(mo); W=s.T//32; w=s.sm.view(np.uint16)
        lane=np.arange(32)
        for i,r in enumerate(regs):
            base=ad.reshape(W,32)[:,8*i:8*i+8]//2  # row starts
            assert not (ad.reshape(W,32)[:,8*i:8*i+8]%16).any()
            ix=base[:,:,None]+np.arange(8)[None,None,:]  # W,8,8
            if h=='ldmatrix':
                Mx=w[ix].astype(U); Mx=Mx.transpose(0,2,1) if tr else Mx
                v=Mx[:,lane//4,2*(lane%4)]|(Mx[:,lane//4,2*(lane%4)+1]<<U(16)); s.set(r,v.reshape(-1),m)
            else:
                v=s.val(r).reshape(W,32); Mx=np.zeros((W,8,8),U)
                Mx[:,lane//4,2*(lane%4)]=v&U(0xffff); Mx[:,lane//4,2*(lane%4)+1]=(v>>U(16))&U(0xffff)
                Mx=Mx.transpose(0,2,1) if tr else Mx
                mw=m.reshape(W,32).all(1); w[ix[mw]]=Mx[mw].astype(np.uint16)
    def wgmma(s,o,a,m):
        shape=[z for z in o if re.match(r'm64n',z)][0]; N=int(re.match(r'm64n(\d+)k16',shape)[1])
        g=bf if 'bf16' in o else hf; WG=s.T//128
        D=[x.strip() for x in a[0].strip('{}').split(',')]; A=[x.strip() for x in a[1].strip('{}').split(',')]
        assert len(A)==4,a
        tr=a[-1]=='1'
        desc=s.val(a[2]).reshape(WG,128); assert (desc==desc[:,:1]).all(),'descriptor differs'
        pp=s.val(a[3]); pp=pp if pp.dtype==bool else pp!=0
        lane=np.arange(32); gr,tg=lane//4,lane%4
        def halves(r): v=s.val(r); return g(v&U(0xffff)).astype(np.float32).reshape(WG,4,32),g((v>>U(16))&U(0xffff)).astype(np.float32).reshape(WG,4,32)
        Am=np.zeros((WG,4,16,16),np.float32)
        for i,r in enumerate(A):
            lo,hi=halves(r); rr=gr+8*(i%2); cc=tg*2+8*(i//2); Am[:,:,rr,cc]=lo; Am[:,:,rr,cc+1]=hi
        Bm=np.zeros((WG,N,16),np.float32); w=s.sm.view(np.uint16)
        for q in range(WG):
            d=int(desc[q,0]); start=(d&0x3fff)<<4; lbo=((d>>16)&0x3fff)<<4; sbo=((d>>32)&0x3fff)<<4; sw=d>>62; bo=(d>>49)&7
            assert bo==0
            S={1:128,2:64,3:32,0:16}[sw]; mk={1:7,2:3,3:1,0:0}[sw]
            n=np.arange(N)[:,None]; k=np.arange(16)[None,:]
            if tr: off=(n//(S//2))*lbo+(k//8)*sbo+(k%8)*S+(n%(S//2))*2
            elif sw: off=(n//8)*sbo+(n%8)*S+k*2
            else: off=(n//8)*sbo+(n%8)*16+(k//8)*lbo+(k%8)*2
            ad=start+off; ad=ad^(((ad>>7)&mk)<<4)
            Bm[q]=g(w[ad//2].astype(U).reshape(-1)).astype(np.float32).reshape(N,16)
        P=np.einsum('qwik,qnk->qwin',Am.astype(np.float64),Bm.astype(np.float64))
        for i,d in enumerate(D):
            r=gr+8*((i//2)%2); c=(i//4)*8+tg*2+i%2
            v=P[:,:,r,c].reshape(-1); old=f32(s.val(d)).astype(np.float64)
            s.set(d,uf32(np.where(pp,v+old,v)),m)
    def mma(s,o,a,m):
        assert 'm16n8k16' in o,o
        assert (m.reshape(-1,32).all(1)==m.reshape(-1,32).any(1)).all(),'mma in diverged warp'
        g=bf if 'bf16' in o else hf
        D,A,B,C=[[x.strip() for x in z.strip('{}').split(',')] for z in a]
        W=s.T//32; lane=np.arange(32); gr,tg=lane//4,lane%4
        def halves(r):
            v=s.val(r); return g(v&U(0xffff)).astype(np.float32).reshape(W,32),g((v>>U(16))&U(0xffff)).astype(np.float32).reshape(W,32)
        Am=np.zeros((W,16,16),np.float32); Bm=np.zeros((W,16,8),np.float32); Cm=np.zeros((W,16,8),np.float32)
        for i,r in enumerate(A):
            lo,hi=halves(r); rr=gr+8*(i%2); cc=tg*2+8*(i//2); Am[:,rr,cc]=lo; Am[:,rr,cc+1]=hi
        for i,r in enumerate(B):
            lo,hi=halves(r); kk=tg*2+8*i; Bm[:,kk,gr]=lo; Bm[:,kk+1,gr]=hi
        for i,r in enumerate(C):
            Cm[:,gr+8*(i//2),tg*2+i%2]=f32(s.val(r)).reshape(W,32)
        Dm=(Am.astype(np.float64)@Bm.astype(np.float64)+Cm).astype(np.float32)
        outs=[Dm[:,gr+8*(i//2),tg*2+i%2].reshape(-1) for i in range(4)]
        for d,v in zip(D,outs): s.set(d,uf32(v),m)
